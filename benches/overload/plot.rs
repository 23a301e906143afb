//! Lines over time as SVG, one panel below the other.

use std::fmt::Write;

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 110.0;
/// Points of a line: more nobody sees.
const POINTS: usize = 240;
const COLOURS: [&str; 5] = ["#999", "#2a6fb0", "#c33", "#2a8a3e", "#c80"];

/// Lines with their names, on one scale that begins at 0 and ends at this value.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) highest: f64,
    pub(crate) lines: Vec<(String, Vec<f64>)>,
}

pub(crate) fn svg(panels: &[Panel]) -> String {
    let (width, height) = (WIDTH + 60.0, panels.len() as f64 * (HEIGHT + 46.0) + 10.0);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for (place, panel) in panels.iter().enumerate() {
        let top = place as f64 * (HEIGHT + 46.0) + 34.0;
        let _ = writeln!(text, "<g transform=\"translate(40,{top})\"><text y=\"-20\">{}</text>", panel.title);
        let _ = writeln!(text, "<path d=\"M0 0V{HEIGHT}H{WIDTH}\" fill=\"none\" stroke=\"black\"/>");
        let _ = writeln!(text, "<text x=\"-6\" y=\"8\" text-anchor=\"end\">{}</text>", panel.highest);
        for (number, (name, values)) in panel.lines.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let _ = writeln!(text, "<text x=\"{}\" y=\"-6\" fill=\"{colour}\">{name}</text>", 120 * number);
            let _ = writeln!(text, "<path d=\"{}\" fill=\"none\" stroke=\"{colour}\"/>", line(values, panel.highest));
        }
        text += "</g>\n";
    }
    text + "</svg>\n"
}

/// The means of as many values as there are to a point.
fn line(values: &[f64], highest: f64) -> String {
    let each = values.len().div_ceil(POINTS).max(1);
    let points = values.chunks(each).map(|chunk| chunk.iter().sum::<f64>() / chunk.len() as f64);
    let mut path = String::new();
    for (place, value) in points.enumerate() {
        let x = (place * each) as f64 / values.len() as f64 * WIDTH;
        let y = HEIGHT - (value / highest).clamp(0.0, 1.0) * HEIGHT;
        let _ = write!(path, "{}{x:.0} {y:.1}", if place == 0 { "M" } else { "L" });
    }
    path
}
