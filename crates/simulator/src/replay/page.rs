//! [`page()`]: a report on a replay as one HTML page with embedded charts, which can be viewed without a network.

use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

use sluicegate_engine::{Outcomes, Snapshot};

use super::{Replay, RuleHits, series::Series};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}\
h1,h2{font-weight:600}table{border-collapse:collapse;margin:1rem 0}th,td{padding:.3rem .8rem;text-align:right;\
border-bottom:1px solid #ddd}th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto}";
/// Maximum number of rules with a chart.
const MAX_CHARTS: usize = 12;
/// Maximum number of entities listed per rule.
const MAX_ENTITIES: usize = 10;
/// Maximum number of characters of a name in a chart.
const MAX_NAME_CHARS: usize = 36;

const ALLOWED: RGBColor = RGBColor(52, 120, 190);
const DENIED: RGBColor = RGBColor(210, 70, 60);

/// Renders a report on `replay` as an HTML page. `title` names the traffic and the rules.
#[must_use]
pub fn page(replay: &Replay, title: &str) -> String {
    let title = escaped(title);
    let [denied, baseline] = replay.denied;
    let mut html = format!(
        "<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>\
         <p>{} requests: {denied} denied by these rules, {baseline} by the baseline.</p>",
        replay.requests
    );
    html += &time_chart("All requests", &replay.series);
    html += "<h2>By rule</h2><table><tr><th>rule<th>hits<th>denied<th>newly denied<th>newly allowed<th>entities<th>entities denied";
    let snapshot = replay.rules();
    let mut rules: Vec<(usize, &RuleHits)> =
        replay.by_rule.iter().enumerate().filter(|(_, rule_hits)| rule_hits.descriptors > 0).collect();
    rules.sort_by_key(|(_, rule_hits)| {
        std::cmp::Reverse((rule_hits.hits.newly_denied + rule_hits.hits.newly_allowed, rule_hits.hits.denied))
    });
    for (id, rule_hits) in &rules {
        let Outcomes { requested, denied, newly_denied, newly_allowed } = rule_hits.hits;
        html += &format!(
            "<tr><td>{}<td>{requested}<td>{denied}<td>{newly_denied}<td>{newly_allowed}<td>{}<td>{}",
            escaped(&rule_name(&snapshot, *id)),
            rule_hits.entities.len(),
            rule_hits.entities_denied()
        );
    }
    html += "</table>";
    for (id, rule_hits) in rules.iter().take(MAX_CHARTS) {
        html += &format!("<h2>{}</h2>", escaped(&rule_name(&snapshot, *id)));
        html += &time_chart("Hits", &rule_hits.series);
        let entities = rule_hits.most_denied(MAX_ENTITIES);
        if entities.is_empty() {
            continue;
        }
        html += &entity_chart(&entities.iter().map(|entity| (&*entity.name, entity.hits)).collect::<Vec<_>>());
        html += "<table><tr><th>entity<th>hits<th>denied<th>newly denied";
        for entity in entities {
            let Outcomes { requested, denied, newly_denied, .. } = entity.hits;
            html += &format!("<tr><td>{}<td>{requested}<td>{denied}<td>{newly_denied}", escaped(&entity.name));
        }
        html += "</table>";
    }
    html + "</html>\n"
}

/// Returns the labels and the limit of a rule, to name it on the page.
fn rule_name(snapshot: &Snapshot, id: usize) -> String {
    let Some(rule) = snapshot.rule_set().rules().get(id) else {
        return "(no rule)".to_owned();
    };
    let labels = rule.labels.join(".");
    match &rule.limit {
        Some(limit) => format!("{labels}: {limit}"),
        None => format!("{labels}: unlimited"),
    }
}

/// The result of drawing a chart. Drawing into memory does not fail, and the page is useful without a chart.
type DrawResult = Result<(), Box<dyn std::error::Error>>;

/// Draws allowed and denied hits over time as a stacked chart.
fn time_chart(title: &str, series: &Series) -> String {
    let mut svg = String::new();
    let _ = draw_time_chart(title, series, &mut svg);
    svg
}

fn draw_time_chart(title: &str, series: &Series, svg: &mut String) -> DrawResult {
    let seconds = series.step as f64 / 1e6;
    let in_hours = series.sums.len() as f64 * seconds > 7_200.0;
    let (unit, scale) = if in_hours { ("hours", 3_600.0) } else { ("seconds", 1.0) };
    let end = series.sums.len().max(1) as f64 * seconds / scale;
    // Points of the areas: the time, and hits per second.
    let mut all = Vec::with_capacity(series.sums.len());
    let mut allowed = Vec::with_capacity(series.sums.len());
    let mut top: f64 = 1.0;
    for (index, [allowed_hits, denied_hits]) in series.sums.iter().enumerate() {
        let x = index as f64 * seconds / scale;
        let rate = (allowed_hits + denied_hits) as f64 / seconds;
        top = top.max(rate);
        all.push((x, rate));
        allowed.push((x, *allowed_hits as f64 / seconds));
    }
    let root = SVGBackend::with_string(svg, (900, 260)).into_drawing_area();
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
    chart
        .draw_series(AreaSeries::new(all, 0.0, DENIED))?
        .label("denied")
        .legend(|position| legend_square(position, DENIED));
    chart
        .draw_series(AreaSeries::new(allowed, 0.0, ALLOWED))?
        .label("allowed")
        .legend(|position| legend_square(position, ALLOWED));
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    Ok(())
}

fn legend_square((x, y): (i32, i32), color: RGBColor) -> Rectangle<(i32, i32)> {
    Rectangle::new([(x, y - 5), (x + 12, y + 5)], color.filled())
}

/// Draws a bar per entity with its allowed and denied hits.
fn entity_chart(entities: &[(&str, Outcomes)]) -> String {
    let mut svg = String::new();
    let _ = draw_entity_chart(entities, &mut svg);
    svg
}

fn draw_entity_chart(entities: &[(&str, Outcomes)], svg: &mut String) -> DrawResult {
    let top = entities.iter().map(|(_, hits)| hits.requested).max().unwrap_or(1).max(1) as f64;
    let rows = entities.len();
    let root = SVGBackend::with_string(svg, (900, 60 + 24 * rows as u32)).into_drawing_area();
    let mut chart = ChartBuilder::on(&root)
        .margin(10)
        .x_label_area_size(36)
        .y_label_area_size(240)
        .build_cartesian_2d(0.0..top * 1.02, 0.0..rows as f64)?;
    chart.configure_mesh().disable_mesh().y_labels(0).x_desc("hits").draw()?;
    let style = ("sans-serif", 13).into_text_style(&root).pos(Pos::new(HPos::Right, VPos::Center));
    for (index, (name, hits)) in entities.iter().enumerate() {
        let row = (rows - 1 - index) as f64;
        let name: String = name.chars().take(MAX_NAME_CHARS).collect();
        let name = EmptyElement::at((0.0, row + 0.5)) + Text::new(name, (-8, 0), style.clone());
        chart.draw_series([name])?;
        let allowed = (hits.requested - hits.denied) as f64;
        let requested = hits.requested as f64;
        chart.draw_series([bar(row, 0.0, allowed, ALLOWED), bar(row, allowed, requested, DENIED)])?;
    }
    root.present()?;
    Ok(())
}

fn bar(row: f64, from: f64, to: f64, color: RGBColor) -> Rectangle<(f64, f64)> {
    Rectangle::new([(from, row + 0.15), (to, row + 0.85)], color.filled())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use sluicegate_rules::{self as rules, Options, SourceFile};

    use super::*;
    use crate::replay::Entity;

    const BLUE: &str = "#3478BE";
    const RED: &str = "#D2463C";

    fn numbers<const N: usize>(texts: [&str; N]) -> [i32; N] {
        texts.map(|text| text.parse().unwrap())
    }

    /// Returns x, y, width and height of the rectangles of a colour.
    fn rectangles(chart: &str, color: &str) -> Vec<[i32; 4]> {
        let rectangles = chart.lines().filter_map(|line| line.strip_prefix("<rect "));
        let values = rectangles.map(|line| line.split('"').collect::<Vec<_>>());
        let colored = values.filter(|values| values[11] == color);
        colored.map(|values| numbers([values[1], values[3], values[5], values[7]])).collect()
    }

    /// Returns the corners of the first area of a colour.
    fn area<'c>(chart: &'c str, color: &str) -> Option<&'c str> {
        let (_, points) = chart.split_once(&format!("fill=\"{color}\" points=\""))?;
        points.split(" \"").next()
    }

    /// Returns the texts of a chart, each with x and y.
    fn texts(chart: &str) -> Vec<([i32; 2], &str)> {
        let text = |element| {
            let values: Vec<_> = str::split(element, '"').collect();
            (numbers([values[1], values[3]]), element.lines().nth(1).unwrap())
        };
        chart.split("<text ").skip(1).map(text).collect()
    }

    fn series(step: u64, sums: Vec<[u64; 2]>) -> Series {
        Series { start: Some(0), step, sums }
    }

    /// The plot is 815 pixels wide, from x = 74, and 181 pixels high, up to y = 213.
    #[test]
    fn areas_have_the_height_of_the_hits_per_second() {
        let chart = time_chart("Hits", &series(2_000_000, vec![[1, 0], [0, 1], [1, 1], [0, 0]]));
        // The steps begin after 0, 2, 4 and 6 of 8 seconds. Denied hits are on top of the allowed ones.
        assert_eq!(area(&chart, RED), Some("74,127 277,127 481,41 685,213 685,213 74,213"));
        assert_eq!(area(&chart, BLUE), Some("74,127 277,213 481,127 685,213 685,213 74,213"));
        // The legend has a square of each colour.
        assert_eq!(rectangles(&chart, RED), [[807, 47, 12, 10]]);
        assert_eq!(rectangles(&chart, BLUE), [[807, 62, 12, 10]]);
        let busy = time_chart("Hits", &series(2_000_000, vec![[3, 5], [0, 0]]));
        let highest = |chart: &str| texts(chart).iter().rfind(|([x, _], _)| *x == 64).unwrap().1.to_owned();
        assert_eq!((highest(&chart), highest(&busy)), ("1.0".into(), "4.0".into()));
    }

    #[test]
    fn times_of_more_than_two_hours_are_in_hours() {
        let axis = |steps: usize| {
            let chart = time_chart("Hits", &series(16_000_000, vec![[1, 0]; steps]));
            let unit = ["seconds", "hours"].into_iter().find(|unit| chart.contains(&format!("{unit} since the first")));
            let last = texts(&chart).iter().rfind(|([_, y], _)| *y == 224).unwrap().1.to_owned();
            (unit.unwrap(), last)
        };
        assert_eq!(axis(450), ("seconds", "7000.0".into()));
        assert_eq!(axis(451), ("hours", "2.0".into()));
    }

    /// The plot is 640 pixels wide, from x = 250, and has a row of 26 pixels for each entity.
    #[test]
    fn bars_have_the_length_of_the_hits() {
        let hits = |requested, denied| Outcomes { requested, denied, ..Outcomes::default() };
        let chart = entity_chart(&[("user=bob", hits(100, 25)), ("user=eve", hits(50, 50))]);
        assert!(chart.starts_with("<svg width=\"900\" height=\"108\""), "{chart}");
        assert_eq!(rectangles(&chart, BLUE), [[250, 14, 469, 18], [250, 40, 0, 18]]);
        assert_eq!(rectangles(&chart, RED), [[719, 14, 157, 18], [250, 40, 313, 18]]);
        let texts = texts(&chart);
        assert!(texts.contains(&([242, 23], "user=bob")) && texts.contains(&([242, 49], "user=eve")), "{texts:?}");
    }

    #[test]
    fn the_page_lists_the_rules_with_most_changed_decisions_first() {
        let rule = |key: &str| format!("- {{key: {key}, rate_limit: {{unit: hour, requests_per_unit: 5}}}}\n");
        let text = format!("domain: api\ndescriptors:\n{}", ["a", "b", "c", "unused"].map(rule).concat());
        let (rules, _) = rules::compile(&[SourceFile { name: "api.yaml".into(), text }], Options::default()).unwrap();
        let mut replay = Replay::new(rules, None);
        (replay.requests, replay.denied) = (20, [10, 7]);
        for (key, newly_denied, newly_allowed) in [("a", 3, 0), ("b", 1, 1), ("c", 2, 2)] {
            let label = format!("api.{key}");
            let id = replay.rules().rule_set().rules().iter().position(|rule| rule.labels.join(".") == label).unwrap();
            let rule_hits = &mut replay.by_rule[id];
            rule_hits.descriptors = 1;
            rule_hits.hits = Outcomes { requested: 9, denied: 4, newly_denied, newly_allowed };
            if key == "c" {
                let name = "user=<bob>".into();
                rule_hits.entities.insert(1, Entity { name, hits: rule_hits.hits });
            }
        }
        let html = page(&replay, "old & new");
        assert!(html.starts_with("<!doctype html>") && html.contains("<h1>old &amp; new</h1>"), "{html}");
        assert!(html.contains("20 requests: 10 denied by these rules, 7 by the baseline"), "{html}");
        let headings: Vec<_> = html.split("<h2>").skip(1).filter_map(|text| text.split("</h2>").next()).collect();
        assert_eq!(headings, ["By rule", "api.c: 5 per hour", "api.a: 5 per hour", "api.b: 5 per hour"]);
        assert!(html.contains("<tr><td>api.c: 5 per hour<td>9<td>4<td>2<td>2<td>1<td>1<tr><td>api.a"), "{html}");
        assert!(html.contains("<tr><td>user=&lt;bob&gt;<td>9<td>4<td>2</table>"), "{html}");
        // One chart of all requests, one of each rule, and one of the entities.
        assert_eq!(html.matches("<svg").count(), 5, "{html}");
    }
}
