//! One line of results, as `--json` writes it and `report` reads it.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::limits::Limit;
use super::meter::Meter;
use crate::outcome::{Failure, Outcome};
use crate::{table, units};

/// What one cell of the grid came to. GB = 1e9 bytes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// Which bench: `local`, `initiator`, `omni`.
    pub(crate) suite: String,
    /// What moved the bytes.
    pub(crate) transport: String,
    /// `read` or `write`; in the suite `omni` the connector's mode.
    pub(crate) op: String,
    /// Bytes of one request.
    pub(crate) block_bytes: u64,
    /// Requests that are waited for together.
    pub(crate) batch: u64,
    /// Threads that each have one batch under way.
    pub(crate) threads: u64,
    /// Bytes over time: the median of the rounds.
    pub(crate) gb_per_s: f64,
    /// Requests over time.
    pub(crate) ops_per_s: f64,
    /// The time of a batch, from submission to its end, in microseconds: the median.
    pub(crate) p50_us: f64,
    /// The time that 99 of 100 batches stayed below, in microseconds.
    pub(crate) p99_us: f64,
    /// Processor time of both ends, in seconds for each GB.
    pub(crate) cpu_s_per_gb: f64,
    /// How the limit was reached.
    pub(crate) limit: String,
    /// What a bare loop reached in between.
    pub(crate) limit_gb_per_s: f64,
    /// The time that a bare loop took for a batch, in microseconds: the median.
    pub(crate) limit_p50_us: f64,
    /// `gb_per_s` over `limit_gb_per_s`.
    pub(crate) ratio_to_limit: f64,
}

/// Which cell of the grid a row belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) suite: &'static str,
    pub(crate) transport: String,
    pub(crate) op: String,
    pub(crate) block: u64,
    pub(crate) batch: u64,
    pub(crate) threads: u64,
}

impl Row {
    /// The row of `cell`.
    pub(crate) fn new(cell: &Cell, meter: &Meter, cpu_s_per_gb: f64, limit: &Limit) -> Self {
        let gb_per_s = meter.gb_per_s();
        let ratio = if limit.gb_per_s > 0.0 { gb_per_s / limit.gb_per_s } else { 0.0 };
        Self {
            suite: cell.suite.to_owned(),
            transport: cell.transport.clone(),
            op: cell.op.clone(),
            block_bytes: cell.block,
            batch: cell.batch,
            threads: cell.threads,
            gb_per_s: units::significant(gb_per_s),
            ops_per_s: units::significant(gb_per_s * 1e9 / cell.block.max(1) as f64),
            p50_us: units::significant(meter.quantile_us(0.5)),
            p99_us: units::significant(meter.quantile_us(0.99)),
            cpu_s_per_gb: units::significant(cpu_s_per_gb),
            limit: limit.name.clone(),
            limit_gb_per_s: units::significant(limit.gb_per_s),
            limit_p50_us: units::significant(limit.p50_us),
            ratio_to_limit: units::significant(ratio),
        }
    }
}

/// The columns of the table.
const HEAD: [&str; 13] = [
    "transport",
    "op",
    "block",
    "batch",
    "threads",
    "GB/s",
    "p50 us",
    "p99 us",
    "cpu s/GB",
    "limit GB/s",
    "limit p50 us",
    "ratio",
    "limit",
];

/// The rows as a table.
pub(crate) fn render(rows: &[Row]) -> String {
    let cells = |row: &Row| {
        let mut cells = vec![row.transport.clone(), row.op.clone(), units::size(row.block_bytes)];
        cells.extend([row.batch, row.threads].map(|value| value.to_string()));
        cells.extend([row.gb_per_s, row.p50_us, row.p99_us, row.cpu_s_per_gb].map(|value| value.to_string()));
        cells.extend(
            [row.limit_gb_per_s, row.limit_p50_us, row.ratio_to_limit].map(|value| value.to_string()),
        );
        cells.push(row.limit.clone());
        cells
    };
    table::render(&HEAD, &rows.iter().map(cells).collect::<Vec<_>>())
}

/// One line for a person who watches.
pub(crate) fn progress(row: &Row) -> String {
    format!(
        "{} {} {} x {}, threads {}: {} GB/s, p50 {} us, {} of the limit",
        row.transport,
        row.op,
        units::size(row.block_bytes),
        row.batch,
        row.threads,
        row.gb_per_s,
        row.p50_us,
        row.ratio_to_limit
    )
}

/// Where rows go as they are measured: nowhere, or to a file that is emptied first.
#[derive(Debug)]
pub(crate) struct RowFile(Option<(String, BufWriter<File>)>);

impl RowFile {
    pub(crate) fn create(path: Option<&Path>) -> Outcome<Self> {
        let create = |path: &Path| {
            let name = path.display().to_string();
            let file =
                File::create(path).map_err(|error| Failure::Usage(format!("--json {name}: {error}")))?;
            Ok((name, BufWriter::new(file)))
        };
        path.map(create).transpose().map(Self)
    }

    /// Writes a row, so that it is there even if the command is ended before the next.
    pub(crate) fn write(&mut self, row: &Row) -> Outcome {
        let Some((name, file)) = &mut self.0 else { return Ok(()) };
        serde_json::to_string(row)
            .map_err(std::io::Error::from)
            .and_then(|line| writeln!(file, "{line}").and_then(|()| file.flush()))
            .map_err(Failure::io(format_args!("write {name}")))
    }
}

/// Reads the rows of a file that `--json` wrote.
pub(crate) fn read(path: &Path) -> Outcome<Vec<Row>> {
    let name = path.display();
    let file = File::open(path).map_err(|error| Failure::Usage(format!("{name}: {error}")))?;
    let mut rows = Vec::new();
    for (index, line) in BufReader::new(file).lines().enumerate() {
        let line = line.map_err(Failure::io(format_args!("read {name}")))?;
        if line.trim().is_empty() {
            continue;
        }
        let row = serde_json::from_str(&line).map_err(|error| {
            Failure::Usage(format!(
                "{name}, line {}: not a line of `posthorse bench --json`: {error}",
                index + 1
            ))
        })?;
        rows.push(row);
    }
    Ok(rows)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::meter::{Latencies, Round};

    pub(crate) fn row(transport: &str, op: &str, block: u64, batch: u64) -> Row {
        let cell =
            Cell { suite: "local", transport: transport.into(), op: op.into(), block, batch, threads: 1 };
        let mut latencies = Latencies::new();
        latencies.record(Duration::from_micros(block / 1000 + 1));
        let mut meter = Meter::new();
        meter.add(&Round {
            bytes: block * 1000,
            elapsed: Duration::from_millis(block / 1000 + 1),
            latencies,
        });
        let limit = Limit { name: "memcpy, 1 thread".into(), gb_per_s: 2.0, p50_us: 3.0 };
        Row::new(&cell, &meter, 0.25, &limit)
    }

    #[test]
    fn the_fields_are_those_of_the_specification_in_its_order() {
        let text = serde_json::to_string(&row("shm", "write", 4096, 1)).unwrap();
        let fields = "suite transport op block_bytes batch threads gb_per_s ops_per_s p50_us p99_us cpu_s_per_gb limit \
                      limit_gb_per_s limit_p50_us ratio_to_limit";
        let mut rest = text.as_str();
        for field in fields.split_whitespace() {
            let at = rest.find(&format!("\"{field}\":")).unwrap_or_else(|| panic!("{field} in {text}"));
            rest = &rest[at..];
        }
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value.as_object().unwrap().len(), fields.split_whitespace().count());
        let ratio = value["ratio_to_limit"].as_f64().unwrap();
        assert!((ratio - value["gb_per_s"].as_f64().unwrap() / 2.0).abs() < 0.001);
    }

    #[test]
    fn the_book_explains_each_column() {
        let page = include_str!("../../../../docs/src/measuring.md");
        let (_, benches) = page.split_once("## The benches").unwrap();
        for column in HEAD.into_iter().filter(|column| *column != "transport") {
            assert!(benches.contains(&format!("`{column}`")), "{column}");
        }
    }

    #[test]
    fn rows_are_read_back_and_a_foreign_line_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rows.jsonl");
        std::fs::write(&path, "of before\n").unwrap();
        let rows = [row("shm", "write", 4096, 1), row("tcp", "read", 1 << 20, 128)];
        let mut file = RowFile::create(Some(&path)).unwrap();
        for row in &rows {
            file.write(row).unwrap();
        }
        assert_eq!(read(&path).unwrap(), rows);
        std::fs::write(&path, "{\"mode\":\"copy\"}\n").unwrap();
        let error = read(&path).unwrap_err();
        assert!(error.message().contains("line 1"), "{error:?}");
    }
}
