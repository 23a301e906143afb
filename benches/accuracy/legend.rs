//! The legend of a plot, in a strip above it.

use plotters::{
    coord::Shift,
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// Height of the strip in pixels.
const HEIGHT: u32 = 22;
/// Distance of the legend from the left edge, in pixels.
const INDENT: i32 = 60;
/// Average width of a letter in pixels.
const LETTER_WIDTH: i32 = 7;

type Area<'s> = DrawingArea<SVGBackend<'s>, Shift>;

/// Draws the names next to their colours and returns the remaining area.
pub(crate) fn legend<'s, 'n>(
    area: &Area<'s>,
    names: impl IntoIterator<Item = (&'n str, RGBColor)>,
) -> Result<Area<'s>, Box<dyn std::error::Error>> {
    let (strip, remaining) = area.split_vertically(HEIGHT);
    let style = ("sans-serif", 12).into_text_style(&strip).pos(Pos::new(HPos::Left, VPos::Center));
    let (mut left, middle) = (INDENT, HEIGHT as i32 / 2);
    for (name, colour) in names {
        strip.draw(&Rectangle::new([(left, middle - 5), (left + 10, middle + 5)], colour.filled()))?;
        strip.draw(&Text::new(name.to_owned(), (left + 15, middle), style.clone()))?;
        left += 15 + LETTER_WIDTH * (name.chars().count() as i32 + 2);
    }
    Ok(remaining)
}
