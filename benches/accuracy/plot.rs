//! A trace as SVG: for each algorithm a panel of what was admitted over time, before the requests in grey.

use std::fmt::Write;

use super::{
    LIMIT,
    traces::{START, Trace},
};

const STEPS: usize = 120;
const WIDTH: f64 = 360.0;
const HEIGHT: f64 = 90.0;
const COLUMNS: usize = 2;

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

pub(crate) fn svg(trace: &Trace, panels: &[Panel]) -> String {
    let micros = panels[0].micros;
    let mut asked = Panel { name: String::new(), admitted: [0; STEPS], micros };
    trace.requests.iter().for_each(|request| asked.admit(request.at));
    let highest = asked.admitted.iter().max().copied().unwrap_or(1).max(1);
    let rows = panels.len().div_ceil(COLUMNS);
    let (width, height) = (COLUMNS as f64 * (WIDTH + 20.0), rows as f64 * (HEIGHT + 34.0) + 10.0);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let per_step = f64::from(LIMIT) * micros as f64 / 60e6;
    for (place, panel) in panels.iter().enumerate() {
        let left = (place % COLUMNS) as f64 * (WIDTH + 20.0) + 10.0;
        let top = (place / COLUMNS) as f64 * (HEIGHT + 34.0) + 24.0;
        let y = |value: f64| HEIGHT - value / f64::from(highest) * HEIGHT;
        let _ = writeln!(text, "<g transform=\"translate({left},{top})\"><text y=\"-6\">{}</text>", panel.name);
        let _ = writeln!(text, "<path d=\"{}\" fill=\"#ccc\"/>", area(&asked.admitted, y));
        let _ = writeln!(text, "<path d=\"{}\" fill=\"#2a6fb0\"/>", area(&panel.admitted, y));
        if trace.requests.iter().all(|request| request.user == 0) && per_step <= f64::from(highest) {
            let limit = y(per_step);
            let _ = writeln!(text, "<path d=\"M0 {limit:.1}H{WIDTH}\" stroke=\"#c33\" stroke-dasharray=\"4 3\"/>");
        }
        let _ = writeln!(text, "<path d=\"M0 {HEIGHT}H{WIDTH}\" stroke=\"black\"/></g>");
    }
    text + "</svg>\n"
}

/// Steps as the outline of an area.
fn area(values: &[u32; STEPS], y: impl Fn(f64) -> f64) -> String {
    let mut path = format!("M0 {HEIGHT}");
    let step = WIDTH / STEPS as f64;
    let mut last = None;
    for (place, value) in values.iter().enumerate() {
        if last != Some(*value) {
            let _ = write!(path, "H{:.0}V{:.1}", place as f64 * step, y(f64::from(*value)));
            last = Some(*value);
        }
    }
    path + &format!("H{WIDTH}V{HEIGHT}Z")
}
