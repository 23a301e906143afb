//! A trace as SVG: one panel for each algorithm with the allowed and the requested hits over time.

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
const REQUESTED: RGBColor = RGBColor(205, 205, 205);
const ALLOWED: RGBColor = RGBColor(52, 120, 190);
const LIMIT_COLOUR: RGBColor = RGBColor(210, 70, 60);

/// The hits that one algorithm allowed, in steps of time.
pub(crate) struct Panel {
    name: String,
    allowed: [u32; STEPS],
    /// Duration of a step.
    micros: u64,
}

impl Panel {
    /// Creates a panel for a trace. It shows at most ten minutes, because bursts are not visible in an hour, but a
    /// trace of a day completely.
    pub(crate) fn new(name: &str, trace: &Trace) -> Self {
        let last = trace.requests.last().map_or(1, |request| request.at - START + 1);
        let shown = if last > 4_000_000_000 { last } else { last.min(600_000_000) };
        Self { name: name.to_owned(), allowed: [0; STEPS], micros: shown.div_ceil(STEPS as u64) }
    }

    pub(crate) fn record(&mut self, at: u64) {
        if let Some(step) = self.allowed.get_mut(((at - START) / self.micros) as usize) {
            *step += 1;
        }
    }
}

pub(crate) fn svg(trace: &Trace, panels: &[Panel]) -> Result<String, Box<dyn std::error::Error>> {
    let micros = panels[0].micros;
    let mut requested = Panel { name: String::new(), allowed: [0; STEPS], micros };
    trace.requests.iter().for_each(|request| requested.record(request.at));
    let seconds = micros as f64 / 1e6;
    let (unit, scale) = if seconds * STEPS as f64 > 7_200.0 { ("hours", 3_600.0) } else { ("minutes", 60.0) };
    let end = STEPS as f64 * seconds / scale;
    // The lines are steps, so that the edges of a burst are vertical.
    let outline = |panel: &Panel| -> Vec<(f64, f64)> {
        let steps = panel.allowed.iter().enumerate();
        let corners = steps.flat_map(|(step, count)| {
            let rate = f64::from(*count) / seconds;
            [step, step + 1].map(|edge| (edge as f64 * seconds / scale, rate))
        });
        let corners: Vec<_> = corners.collect();
        // Points with the same height as both neighbours are omitted.
        let is_corner = |index: usize| {
            let same = |other: Option<usize>| {
                other.and_then(|other| corners.get(other)).is_some_and(|other: &(f64, f64)| other.1 == corners[index].1)
            };
            !(same(index.checked_sub(1)) && same(Some(index + 1)))
        };
        (0..corners.len()).filter(|index| is_corner(*index)).map(|index| corners[index]).collect()
    };
    let requests = outline(&requested);
    let top = requests.iter().map(|(_, rate)| *rate).fold(0.0, f64::max) * 1.05;
    // The limit is that of one user, so it is not drawn for several users.
    let limit = f64::from(LIMIT) / 60.0;
    let limit = Some(limit).filter(|limit| *limit <= top && trace.requests.iter().all(|request| request.user == 0));
    let rows = panels.len().div_ceil(COLUMNS);
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, (WIDTH * COLUMNS as u32, HEIGHT * rows as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let names =
        [("requested", REQUESTED), ("allowed", ALLOWED)].into_iter().chain(limit.map(|_| ("limit", LIMIT_COLOUR)));
    let chart_area = legend(&root, names)?;
    for (panel, area) in panels.iter().zip(chart_area.split_evenly((rows, COLUMNS))) {
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
        chart.draw_series(AreaSeries::new(requests.iter().copied(), 0.0, REQUESTED))?;
        chart.draw_series(AreaSeries::new(outline(panel), 0.0, ALLOWED))?;
        if let Some(limit) = limit {
            chart.draw_series(LineSeries::new([(0.0, limit), (end, limit)], LIMIT_COLOUR))?;
        }
    }
    root.present()?;
    drop((chart_area, root));
    Ok(svg)
}
