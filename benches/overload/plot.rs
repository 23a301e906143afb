//! Plots lines over time as SVG, in panels below each other.

use plotters::prelude::*;

use super::legend::legend;

const WIDTH: u32 = 820;
const HEIGHT: u32 = 220;
/// Maximum number of points of a line. More would not be visible.
const MAX_POINTS: usize = 240;
const COLOURS: [RGBColor; 5] = [
    RGBColor(150, 150, 150),
    RGBColor(52, 120, 190),
    RGBColor(210, 70, 60),
    RGBColor(42, 138, 62),
    RGBColor(220, 140, 0),
];

/// Named lines on a common scale from 0 to `max_value`.
pub(crate) struct Panel {
    pub(crate) title: String,
    /// Unit of the values, for the axis.
    pub(crate) unit: &'static str,
    /// Number of values per second.
    pub(crate) values_per_second: f64,
    pub(crate) max_value: f64,
    pub(crate) lines: Vec<(String, Vec<f64>)>,
}

pub(crate) fn svg(panels: &[Panel]) -> Result<String, Box<dyn std::error::Error>> {
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT * panels.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (panel, area) in panels.iter().zip(root.split_evenly((panels.len(), 1))) {
        let values = panel.lines.iter().map(|(_, values)| values.len()).max().unwrap_or(1);
        let minute = |index: usize| index as f64 / panel.values_per_second / 60.0;
        let colours = || COLOURS.into_iter().cycle();
        let area = legend(&area, panel.lines.iter().map(|(name, _)| name.as_str()).zip(colours()))?;
        let mut chart = ChartBuilder::on(&area)
            .margin(8)
            .caption(&panel.title, ("sans-serif", 14))
            .x_label_area_size(34)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..minute(values), 0.0..panel.max_value)?;
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc("minutes").y_desc(panel.unit).y_labels(5).light_line_style(TRANSPARENT).draw()?;
        for ((_, values), colour) in panel.lines.iter().zip(colours()) {
            let points = points(values).map(|(index, value)| (minute(index), value.clamp(0.0, panel.max_value)));
            chart.draw_series(LineSeries::new(points, colour))?;
        }
    }
    root.present()?;
    drop(root);
    Ok(svg)
}

/// Reduces the values to at most [`MAX_POINTS`] means, each with the index of its first value.
fn points(values: &[f64]) -> impl Iterator<Item = (usize, f64)> {
    let values_per_point = values.len().div_ceil(MAX_POINTS).max(1);
    let means = values.chunks(values_per_point).map(|chunk| chunk.iter().sum::<f64>() / chunk.len() as f64);
    means.enumerate().map(move |(index, mean)| (index * values_per_point, mean))
}
