//! `bench report`: rows of JSON Lines become one page that needs nothing else.

mod plot;

use std::fmt::Write;
use std::fs;
use std::path::PathBuf;

use clap::Args;

use self::plot::{Plot, Scale, Series, Stroke, colour, escape};
use super::row::{self, Row};
use crate::outcome::{Failure, Outcome, print};
use crate::units;

/// The arguments of `bench report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Files that `--json` wrote
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// The page to write
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
}

/// Runs the command.
pub(crate) fn run(args: &ReportArgs) -> Outcome {
    let mut rows = Vec::new();
    for file in &args.files {
        rows.extend(row::read(file)?);
    }
    if rows.is_empty() {
        return Err(Failure::Usage("the files hold no results".to_owned()));
    }
    let name = args.output.display();
    fs::write(&args.output, page(&rows)).map_err(Failure::io(format_args!("write {name}")))?;
    print(&format!("{} results in {name}\n", rows.len()))
}

const STYLE: &str = "\
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1440px; padding: 0 1rem; color: #1b1b1b; }
svg { background: #fff; border: 1px solid #ddd; margin: 0 .5rem .5rem 0; }
svg text { font: 11px system-ui, sans-serif; fill: #333; }
svg .title { font-size: 13px; font-weight: 600; }
svg .grid { stroke: #e6e6e6; }
svg polyline { fill: none; stroke-width: 1.8; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; border-bottom: 1px solid #e6e6e6; text-align: right; }
th { position: sticky; top: 0; background: #fff; }
.text { text-align: left; }
.key span { margin-right: 1.2rem; white-space: nowrap; }
.scroll { overflow-x: auto; }
";

/// The whole page.
fn page(rows: &[Row]) -> String {
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<title>Posthorse bench</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<h1>Posthorse bench</h1>\n\
         <p>Solid lines are Posthorse. Dashed lines are the limit: bare loops, measured in the same minutes, that \
         share no code with it. Dotted lines are the 99th percentile. GB = 10<sup>9</sup> bytes; latencies are \
         those of a whole batch.</p>\n"
    );
    for group in groups(rows) {
        let first = group[0];
        let title = format!("{}: {} {}", first.suite, first.transport, first.op);
        let _ = writeln!(page, "<h2>{}</h2>", escape(&title));
        page.push_str(&plots(&group));
    }
    page.push_str("<h2>All results</h2>\n");
    page.push_str(&table(rows));
    page.push_str("</body>\n</html>\n");
    page
}

/// The rows of each suite, transport and operation, in the order in which these come first.
fn groups(rows: &[Row]) -> Vec<Vec<&Row>> {
    let same = |a: &Row, b: &Row| (&a.suite, &a.transport, &a.op) == (&b.suite, &b.transport, &b.op);
    let mut groups: Vec<Vec<&Row>> = Vec::new();
    for row in rows {
        match groups.iter_mut().find(|group| same(group[0], row)) {
            Some(group) => group.push(row),
            None => groups.push(vec![row]),
        }
    }
    groups
}

/// Throughput, latency and ratio of a group, with a line for each batch size and number of threads.
fn plots(group: &[&Row]) -> String {
    let mut shapes: Vec<(u64, u64)> = group.iter().map(|row| (row.batch, row.threads)).collect();
    shapes.sort_unstable();
    shapes.dedup();
    let series = |what: &str, stroke, value: fn(&Row) -> f64| -> Vec<Series> {
        let line = |(index, shape): (usize, &(u64, u64))| {
            let rows = group.iter().filter(|row| (row.batch, row.threads) == *shape);
            let mut points: Vec<(u64, f64)> = rows.map(|row| (row.block_bytes, value(row))).collect();
            points.sort_by_key(|point| point.0);
            let label = format!("{}, {what}", shape_name(*shape));
            Series { label, colour: index, stroke, points }
        };
        shapes.iter().enumerate().map(line).collect()
    };
    let mut rate = series("limit", Stroke::Dashed, |row| row.limit_gb_per_s);
    rate.extend(series("GB/s", Stroke::Solid, |row| row.gb_per_s));
    let mut latency = series("limit", Stroke::Dashed, |row| row.limit_p50_us);
    latency.extend(series("p99", Stroke::Dotted, |row| row.p99_us));
    latency.extend(series("p50", Stroke::Solid, |row| row.p50_us));
    let ratio = series("ratio", Stroke::Solid, |row| row.ratio_to_limit);

    let mut html = String::from("<p class=\"key\">");
    for (index, shape) in shapes.iter().enumerate() {
        let _ = write!(
            html,
            "<span><b style=\"color:{}\">&#9644;</b> {}</span>",
            colour(index),
            shape_name(*shape)
        );
    }
    html.push_str("</p>\n<div>\n");
    for (title, scale, series) in [
        ("Throughput, GB/s", Scale::Linear, &rate),
        ("Latency of a batch, microseconds", Scale::Log, &latency),
        ("Throughput over its limit", Scale::Linear, &ratio),
    ] {
        html.push_str(&Plot { title, scale, series }.render());
    }
    html + "</div>\n"
}

fn shape_name((batch, threads): (u64, u64)) -> String {
    let threads = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
    format!("batch {batch}, {threads}")
}

fn table(rows: &[Row]) -> String {
    let head = "<tr><th class=\"text\">suite</th><th class=\"text\">transport</th><th class=\"text\">op</th><th>block</th>\
                <th>batch</th><th>threads</th><th>GB/s</th><th>ops/s</th><th>p50 µs</th><th>p99 µs</th>\
                <th>cpu s/GB</th><th>limit GB/s</th><th>limit p50 µs</th><th>ratio</th>\
                <th class=\"text\">limit</th></tr>";
    let mut html = format!("<div class=\"scroll\"><table>\n<thead>{head}</thead>\n<tbody>\n");
    for row in rows {
        html.push_str("<tr>");
        for text in [&row.suite, &row.transport, &row.op] {
            let _ = write!(html, "<td class=\"text\">{}</td>", escape(text));
        }
        let _ = write!(
            html,
            "<td>{}</td><td>{}</td><td>{}</td>",
            units::size(row.block_bytes),
            row.batch,
            row.threads
        );
        for value in [
            row.gb_per_s,
            row.ops_per_s,
            row.p50_us,
            row.p99_us,
            row.cpu_s_per_gb,
            row.limit_gb_per_s,
            row.limit_p50_us,
            row.ratio_to_limit,
        ] {
            let _ = write!(html, "<td>{value}</td>");
        }
        let _ = writeln!(html, "<td class=\"text\">{}</td></tr>", escape(&row.limit));
    }
    html + "</tbody>\n</table></div>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::row::tests::row;

    fn rows() -> Vec<Row> {
        let mut rows = Vec::new();
        for transport in ["shm", "tcp"] {
            for batch in [1, 128] {
                for block in [4096, 1 << 20] {
                    rows.push(row(transport, "write", block, batch));
                }
            }
        }
        rows
    }

    /// The tags that are open after `html`; a tag that does not fit is a failure.
    fn check_nesting(html: &str) {
        let mut open: Vec<&str> = Vec::new();
        for tag in html.split('<').skip(1) {
            let (tag, _) = tag.split_once('>').unwrap_or_else(|| panic!("<{tag} does not end"));
            let name = tag.split([' ', '/']).find(|part| !part.is_empty()).unwrap();
            if tag.starts_with('!') || tag.ends_with('/') || name == "meta" {
                continue;
            }
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name), "</{name}>");
            } else {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }

    #[test]
    fn the_page_is_well_formed_and_has_every_row_and_plot() {
        let rows = rows();
        let page = page(&rows);
        check_nesting(&page);
        assert_eq!(page.matches("<svg").count(), 2 * 3);
        assert_eq!(page.matches("<tbody>\n").count(), 1);
        let body = page.split("<tbody>").nth(1).unwrap();
        assert_eq!(body.matches("<tr>").count(), rows.len());
        for row in &rows {
            let cells = format!(
                "<td class=\"text\">{}</td><td class=\"text\">write</td><td>{}</td><td>{}</td>",
                row.transport,
                units::size(row.block_bytes),
                row.batch
            );
            assert!(body.contains(&cells), "{cells}");
        }
        // Two points on each of six lines, one line for each batch size: p50, p99 and limits among them.
        assert_eq!(page.matches("<circle").count(), 2 * (2 * 2 * 6));
    }

    #[test]
    fn the_page_needs_nothing_from_outside() {
        let page = page(&rows());
        for needle in ["http:", "https:", "<script", "src=", "href=", "@import", "url("] {
            assert!(!page.contains(needle), "{needle}");
        }
    }

    #[test]
    fn hostile_text_stays_text() {
        let mut row = row("<b>", "write", 1, 1);
        row.limit = "<script>".to_owned();
        let page = page(&[row]);
        check_nesting(&page);
        assert!(!page.contains("<script") && page.contains("&lt;b&gt;"));
    }

    #[test]
    fn a_page_of_nothing_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (input, output) = (folder.path().join("rows"), folder.path().join("page.html"));
        fs::write(&input, "\n").unwrap();
        let args = ReportArgs { files: vec![input], output };
        assert!(matches!(run(&args), Err(Failure::Usage(_))));
    }
}
