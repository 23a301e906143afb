//! A trace as SVG: for each algorithm a panel of what was admitted over time, before what was asked.

use plotters::prelude::*;

use super::{
    LIMIT,
    legend::legend,
    traces::{START, Trace},
};

const STEPS: usize = 120;
const WIDTH: u32 = 440;
const HEIGHT: u32 = 190;
const COLUMNS: usize = 2;
const ASKED: RGBColor = RGBColor(205, 205, 205);
const ADMITTED: RGBColor = RGBColor(52, 120, 190);
const REFUSED: RGBColor = RGBColor(210, 70, 60);

/// What one algorithm admitted, in steps of time.
pub(crate) struct Panel {
    name: String,
    admitted: [u32; STEPS],
    /// Of a step.
    micros: u64,
}

impl Panel {
    /// A plot shows ten minutes at most: in an hour nobody sees a burst. A day is shown whole.
    pub(crate) fn new(name: &str, trace: &Trace) -> Self {
        let last = trace.requests.last().map_or(1, |request| request.at - START + 1);
        let shown = if last > 4_000_000_000 { last } else { last.min(600_000_000) };
        Self { name: name.to_owned(), admitted: [0; STEPS], micros: shown.div_ceil(STEPS as u64) }
    }

    pub(crate) fn admit(&mut self, at: u64) {
        if let Some(step) = self.admitted.get_mut(((at - START) / self.micros) as usize) {
            *step += 1;
        }
    }
}

pub(crate) fn svg(trace: &Trace, panels: &[Panel]) -> Result<String, Box<dyn std::error::Error>> {
    let micros = panels[0].micros;
    let mut asked = Panel { name: String::new(), admitted: [0; STEPS], micros };
    trace.requests.iter().for_each(|request| asked.admit(request.at));
    let seconds = micros as f64 / 1e6;
    let (unit, scale) = if seconds * STEPS as f64 > 7_200.0 { ("hours", 3_600.0) } else { ("minutes", 60.0) };
    let end = STEPS as f64 * seconds / scale;
    // As outlines of steps: a burst is what it was, and no slope to it.
    let outline = |panel: &Panel| -> Vec<(f64, f64)> {
        let steps = panel.admitted.iter().enumerate();
        let corners = steps.flat_map(|(step, count)| {
            let rate = f64::from(*count) / seconds;
            [step, step + 1].map(|edge| (edge as f64 * seconds / scale, rate))
        });
        let corners: Vec<_> = corners.collect();
        // What is as high as what is beside it on both sides is no corner.
        let is_corner = |place: usize| {
            let same = |other: Option<usize>| {
                other.and_then(|it| corners.get(it)).is_some_and(|it: &(f64, f64)| it.1 == corners[place].1)
            };
            !(same(place.checked_sub(1)) && same(Some(place + 1)))
        };
        (0..corners.len()).filter(|place| is_corner(*place)).map(|place| corners[place]).collect()
    };
    let before = outline(&asked);
    let top = before.iter().map(|(_, rate)| *rate).fold(0.0, f64::max) * 1.05;
    // A limit of one user; of many users there are many.
    let limit = f64::from(LIMIT) / 60.0;
    let limit = Some(limit).filter(|limit| *limit <= top && trace.requests.iter().all(|request| request.user == 0));
    let rows = panels.len().div_ceil(COLUMNS);
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, (WIDTH * COLUMNS as u32, HEIGHT * rows as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let names = [("asked", ASKED), ("admitted", ADMITTED)].into_iter().chain(limit.map(|_| ("limit", REFUSED)));
    let below = legend(&root, names)?;
    for (panel, area) in panels.iter().zip(below.split_evenly((rows, COLUMNS))) {
        let mut chart = ChartBuilder::on(&area)
            .margin(8)
            .caption(&panel.name, ("sans-serif", 14))
            .x_label_area_size(34)
            .y_label_area_size(52)
            .build_cartesian_2d(0.0..end, 0.0..top)?;
        let mesh = &mut chart.configure_mesh();
        let label = |value: &f64| value.round().to_string();
        let mesh = mesh.x_desc(unit).y_desc("requests per second").x_label_formatter(&label);
        mesh.x_labels(6).y_labels(5).light_line_style(TRANSPARENT).draw()?;
        chart.draw_series(AreaSeries::new(before.iter().copied(), 0.0, ASKED))?;
        chart.draw_series(AreaSeries::new(outline(panel), 0.0, ADMITTED))?;
        if let Some(limit) = limit {
            chart.draw_series(LineSeries::new([(0.0, limit), (end, limit)], REFUSED))?;
        }
    }
    root.present()?;
    drop((below, root));
    Ok(svg)
}
