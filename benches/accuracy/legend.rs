//! What the colours of a plot mean, in a strip above it, where it covers nothing.

use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// Of the strip, in pixels.
const HEIGHT: u32 = 22;
/// From the left; and for a letter.
const INDENT: i32 = 60;
const LETTER: i32 = 7;

type Area<'s> = DrawingArea<SVGBackend<'s>, Shift>;

/// Writes the names beside their colours, and gives what is left of the area.
pub(crate) fn legend<'s, 'n>(
    area: &Area<'s>,
    names: impl IntoIterator<Item = (&'n str, RGBColor)>,
) -> Result<Area<'s>, Box<dyn std::error::Error>> {
    let (strip, rest) = area.split_vertically(HEIGHT);
    let style = ("sans-serif", 12).into_text_style(&strip).pos(Pos::new(HPos::Left, VPos::Center));
    let (mut left, middle) = (INDENT, HEIGHT as i32 / 2);
    for (name, colour) in names {
        strip.draw(&Rectangle::new([(left, middle - 5), (left + 10, middle + 5)], colour.filled()))?;
        strip.draw(&Text::new(name.to_owned(), (left + 15, middle), style.clone()))?;
        left += 15 + LETTER * (name.chars().count() as i32 + 2);
    }
    Ok(rest)
}
