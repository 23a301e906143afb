//! A run as one HTML page with its pictures in it: it opens without a network.

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use super::{Hits, Replay, RuleHits, series::Series};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}\
h1,h2{font-weight:600}table{border-collapse:collapse;margin:1rem 0}th,td{padding:.3rem .8rem;text-align:right;\
border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto}";
/// Rules that have a picture of their own.
const PICTURES: usize = 12;
/// Entities that are named for each.
const ENTITIES: usize = 10;
/// Letters of a name in a picture.
const LONGEST_NAME: usize = 36;

const ADMITTED: RGBColor = RGBColor(52, 120, 190);
const REFUSED: RGBColor = RGBColor(210, 70, 60);

/// The page. `title`: what was asked again, and of what.
#[must_use]
pub fn page(replay: &Replay, title: &str) -> String {
    let title = escaped(title);
    let [refused, before] = replay.refused;
    let mut html = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>\
         <p>{} requests: {refused} refused by these rules, {before} before.</p>",
        replay.requests
    );
    html += &picture("All requests", &replay.series);
    html += "<h2>By rule</h2><table><tr><th>rule<th>hits<th>refused<th>newly refused<th>newly passed<th>entities<th>touched";
    let snapshot = replay.rules();
    let name = |id: usize| match snapshot.rules().rules().get(id) {
        Some(rule) => {
            format!(
                "{}: {}",
                rule.labels.join("."),
                rule.limit.as_ref().map_or("unlimited".into(), ToString::to_string)
            )
        }
        None => "(no rule)".to_owned(),
    };
    let mut asked: Vec<(usize, &RuleHits)> =
        replay.of_rules.iter().enumerate().filter(|(_, it)| it.asked > 0).collect();
    asked.sort_by_key(|(_, it)| std::cmp::Reverse((it.hits.newly_denied + it.hits.newly_allowed, it.hits.denied)));
    for (id, it) in &asked {
        let Hits { requested: asked, denied: refused, newly_denied: newly_refused, newly_allowed: newly_passed } =
            it.hits;
        html += &format!(
            "<tr><td>{}<td>{asked}<td>{refused}<td>{newly_refused}<td>{newly_passed}<td>{}<td>{}",
            escaped(&name(*id)),
            it.entities.len(),
            it.touched()
        );
    }
    html += "</table>";
    for (id, it) in asked.iter().take(PICTURES) {
        html += &format!("<h2>{}</h2>", escaped(&name(*id)));
        html += &picture("Hits", &it.series);
        let harmed = it.harmed(ENTITIES);
        if harmed.is_empty() {
            continue;
        }
        html += &bars(&harmed.iter().map(|entity| (&*entity.name, entity.hits)).collect::<Vec<_>>());
        html += "<table><tr><th>entity<th>hits<th>refused<th>newly refused";
        for entity in harmed {
            let Hits { requested: asked, denied: refused, newly_denied: newly_refused, .. } = entity.hits;
            html += &format!("<tr><td>{}<td>{asked}<td>{refused}<td>{newly_refused}", escaped(&entity.name));
        }
        html += "</table>";
    }
    html + "</html>\n"
}

/// Admitted and refused over time, stacked.
fn picture(title: &str, series: &Series) -> String {
    let seconds = series.step as f64 / 1e6;
    let rate = |hits: u64| hits as f64 / seconds;
    let top = series.sums.iter().map(|[admitted, refused]| rate(admitted + refused)).fold(1.0, f64::max);
    let (unit, scale) =
        if series.sums.len() as f64 * seconds > 7_200.0 { ("hours", 3_600.0) } else { ("seconds", 1.0) };
    let x = |place: usize| place as f64 * seconds / scale;
    let end = x(series.sums.len().max(1));
    let mut svg = String::new();
    let mut drawn = || -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(&mut svg, (900, 260)).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .caption(title, ("sans-serif", 16))
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..end, 0.0..top * 1.05)?;
        let mesh = &mut chart.configure_mesh();
        mesh.x_desc(format!("{unit} since the first request"))
            .y_desc("hits per second")
            .light_line_style(TRANSPARENT)
            .draw()?;
        let sums = || series.sums.iter().enumerate();
        let all = sums().map(|(place, [admitted, refused])| (x(place), rate(admitted + refused)));
        let admitted = sums().map(|(place, [admitted, _])| (x(place), rate(*admitted)));
        let square = |color: RGBColor| move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled());
        chart.draw_series(AreaSeries::new(all, 0.0, REFUSED))?.label("refused").legend(square(REFUSED));
        chart.draw_series(AreaSeries::new(admitted, 0.0, ADMITTED))?.label("admitted").legend(square(ADMITTED));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .draw()?;
        root.present()?;
        Ok(())
    };
    // Into memory nothing fails; and a page without a picture is a page.
    let _ = drawn();
    svg
}

/// Of each entity what was admitted, and what was refused.
fn bars(entities: &[(&str, Hits)]) -> String {
    let top = entities.iter().map(|(_, hits)| hits.requested).max().unwrap_or(1).max(1) as f64;
    let rows = entities.len();
    let mut svg = String::new();
    let mut drawn = || -> Result<(), Box<dyn std::error::Error>> {
        let root = SVGBackend::with_string(&mut svg, (900, 60 + 24 * rows as u32)).into_drawing_area();
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .x_label_area_size(36)
            .y_label_area_size(240)
            .build_cartesian_2d(0.0..top * 1.02, 0.0..rows as f64)?;
        chart.configure_mesh().disable_mesh().y_labels(0).x_desc("hits").draw()?;
        let style = ("sans-serif", 13).into_text_style(&root).pos(Pos::new(HPos::Right, VPos::Center));
        for (place, (name, hits)) in entities.iter().enumerate() {
            let row = (rows - 1 - place) as f64;
            let name: String = name.chars().take(LONGEST_NAME).collect();
            let name = EmptyElement::at((0.0, row + 0.5)) + Text::new(name, (-8, 0), style.clone());
            chart.draw_series([name])?;
            let admitted = (hits.requested - hits.denied) as f64;
            let bar = |from: f64, to: f64, color: RGBColor| {
                Rectangle::new([(from, row + 0.15), (to, row + 0.85)], color.filled())
            };
            chart.draw_series([bar(0.0, admitted, ADMITTED), bar(admitted, hits.requested as f64, REFUSED)])?;
        }
        root.present()?;
        Ok(())
    };
    // Into memory nothing fails; and a page without a picture is a page.
    let _ = drawn();
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
