//! The command as one runs it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;

const TOKEN: u64 = 57_344;

fn posthorse(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_posthorse"));
    command.args(arguments).env_remove("POSTHORSE_LOG").stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Output {
    posthorse(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs a command that must succeed, and returns what it printed.
fn printed(arguments: &[&str]) -> String {
    let output = output(arguments);
    assert!(output.status.success(), "{arguments:?}: {}\n{}", output.status, text(&output.stderr));
    text(&output.stdout)
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn demo(transport: &str, modes: &[&str]) {
    let size = (3 * TOKEN + 1).to_string();
    let lines =
        json_lines(&printed(&["demo", "--json", "--count", "2", "--size", &size, "--transport", transport]));
    let expected: Vec<&str> = modes.iter().flat_map(|mode| [*mode; 2]).collect();
    let found: Vec<&str> = lines.iter().map(|line| line["mode"].as_str().unwrap()).collect();
    assert_eq!(found, expected);
    for line in &lines {
        let mut fields =
            ["mode", "transport", "bytes", "tensors", "sha256", "put_ms", "get_ms", "gb_per_s", "verified"];
        let mut found = keys(line);
        fields.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, fields);
        assert_eq!(line["verified"], true, "{line}");
        assert_eq!(line["transport"], transport, "{line}");
        assert_eq!(line["bytes"], 3 * TOKEN, "{line}");
        assert_eq!(line["tensors"], if line["mode"] == "copy" { 1 } else { 56 }, "{line}");
        assert_eq!(line["sha256"], lines[0]["sha256"]);
        assert!(
            ["put_ms", "get_ms", "gb_per_s"].iter().all(|field| line[*field].as_f64().unwrap() > 0.0),
            "{line}"
        );
    }
}

#[test]
fn demo_over_shm_is_verified_in_every_mode() {
    demo("shm", &["zero_copy", "copy", "object", "lease"]);
}

#[test]
fn demo_over_tcp_is_verified_in_every_mode() {
    demo("tcp", &["zero_copy", "copy", "object"]);
}

#[test]
fn demo_ends_with_a_table_and_takes_the_best_transport() {
    let text = printed(&["demo", "--size", "57344", "--count", "1"]);
    assert_eq!(text.lines().count(), 2 + 4, "{text}");
    assert!(text.lines().skip(2).all(|line| line.contains("shm") && line.ends_with("yes")), "{text}");
}

#[test]
fn demo_moves_the_tensors_of_a_file_under_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let header = r#"{"b.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"a.bias":{"dtype":"BF16","shape":[3],"data_offsets":[16,22]}}"#;
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(0..22_u8);
    fs::write(&path, file).unwrap();
    // sha256 of the bytes 0 to 21.
    let digest = "22cb4df00cddd6067ad5cfa2bba9857f21a06843e1a6e39ad1a68cb9a45ab8b7";
    let lines = json_lines(&printed(&["demo", "--json", "--count", "1", "--input", path.to_str().unwrap()]));
    assert_eq!(lines.len(), 4);
    for line in lines {
        assert_eq!((&line["verified"], &line["sha256"]), (&true.into(), &digest.into()), "{line}");
        assert_eq!(
            (&line["bytes"], line["tensors"].as_u64().unwrap()),
            (&22.into(), if line["mode"] == "copy" { 1 } else { 2 })
        );
    }
}

#[test]
fn wrong_usage_names_argument_value_and_what_is_accepted() {
    for (arguments, parts) in [
        (&["demo", "--size", "57343"][..], &["--size", "57343", "57344"][..]),
        (&["demo", "--size", "100TiB"], &["--size", "109951162777600", "accepted: up to"]),
        (&["demo", "--size", "18446744073709551615"], &["--size", "18446744073709551615", "accepted: up to"]),
        (&["demo", "--input", "/dev/zero"], &["--input", "/dev/zero", "no regular file"]),
        (&["bench", "local", "--memory", "100TiB"], &["--memory", "109951162777600", "accepted: up to"]),
        (
            &["bench", "target", "--listen", "127.0.0.1:0", "--memory", "100TiB"],
            &["--memory", "109951162777600", "accepted: up to"],
        ),
        (&["bench", "omni", "--block", "100TiB"], &["--block", "109951162777600", "accepted: up to"]),
        (&["soak", "--pool", "100TiB"], &["--pool", "109951162777600", "accepted: up to"]),
        (&["demo", "--size", "12 parsecs"], &["--size", "12 parsecs", "MiB"]),
        (&["demo", "--transport", "pigeon"], &["--transport", "pigeon", "auto, shm, tcp"]),
        (&["demo", "--count", "0"], &["--count", "'0'", "1..="]),
        (&["demo", "--input", "/nowhere.safetensors"], &["--input", "/nowhere.safetensors"]),
        (&["bench", "local", "--block", "1MiB", "--memory", "4KiB", "--duration", "1ms"], &["--memory"]),
        (&["bench", "omni", "--block", "1KiB"], &["--block", "1024", "57344"]),
        (&["bench", "initiator", "--target", "nobody"], &["--target", "nobody"]),
        (&["bench", "report", "/nowhere.jsonl", "-o", "/nowhere.html"], &["/nowhere.jsonl"]),
        (&["soak", "--max-size", "1MiB", "--pool", "1MiB"], &["--pool", "1 MiB", "--max-size"]),
        (&["gallop"], &["gallop"]),
    ] {
        let output = output(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(parts.iter().all(|part| said.contains(part)), "{arguments:?}: {said}");
    }
    for log in ["no=such=level", "bogus=,,"] {
        let output = posthorse(&["demo"]).env("POSTHORSE_LOG", log).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(log));
    }
}

#[test]
fn cells_that_are_left_out_are_named_once_each() {
    let output = output(&["bench", "local", "--block", "256MiB,512MiB", "--memory", "1MiB", "--batch", "1"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let mut lines: Vec<&str> = said.lines().filter(|line| line.starts_with("left out: ")).collect();
    assert_eq!(lines.len(), 4, "{said}");
    assert_eq!(lines[0], "left out: 256 MiB x 1, threads 1: more than --memory 1 MiB");
    lines.dedup();
    assert_eq!(lines.len(), 4, "{said}");
}

#[test]
fn demo_says_why_there_is_no_lease() {
    let lease = |transport: &str| {
        let output = output(&["demo", "--transport", transport, "--size", "57344", "--count", "1"]);
        (text(&output.stdout).contains("lease"), text(&output.stderr).contains("left out: lease"))
    };
    assert_eq!(lease("shm"), (true, false));
    assert_eq!(lease("tcp"), (false, true));
}

#[test]
fn a_transport_that_is_misspelt_in_the_order_is_named_in_a_warning() {
    let output = posthorse(&["demo", "--size", "57344", "--count", "1"])
        .env("POSTHORSE_LOG", "warn")
        .env("POSTHORSE_ENGINE_TRANSPORT_ORDER", "tcp,smh")
        .output()
        .unwrap();
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("transport_order names \"smh\""), "{said}");
    assert!(!said.contains("names \"tcp\""), "{said}");
}

#[test]
fn variables_override_the_configuration_are_refused_by_name_or_named_in_a_warning() {
    let demo = |name: &str, value: &str| {
        let arguments = ["demo", "--transport", "tcp", "--size", "57344", "--count", "1"];
        posthorse(&arguments).env("POSTHORSE_LOG", "warn").env(name, value).output().unwrap()
    };
    let refused = demo("POSTHORSE_TCP_LIVENESS_MS", "1");
    let said = text(&refused.stderr);
    assert!(!refused.status.success(), "{said}");
    for part in ["POSTHORSE_TCP_LIVENESS_MS", "liveness_ms is 1", "60 to 3600000"] {
        assert!(said.contains(part), "{part} is missing in {said}");
    }
    // What is wrong with a folder is seen when the transport starts.
    for (folder, accepted) in [("here", "an absolute path"), ("/dev/null", "a folder, not a link or file")] {
        let refused = demo("POSTHORSE_SHM_FOLDER", folder);
        let said = text(&refused.stderr);
        assert!(!refused.status.success() && !std::path::Path::new(folder).is_dir(), "{said}");
        for part in ["as POSTHORSE_SHM_FOLDER says: ", &format!("folder is {folder:?}; accepted: {accepted}")]
        {
            assert!(said.contains(part), "{part} is missing in {said}");
        }
    }
    // The demo builds its engine itself.
    let refused = demo("POSTHORSE_CONNECTOR_TRANSPORT", "require:tcp");
    let said = text(&refused.stderr);
    assert!(!refused.status.success(), "{said}");
    let blamed = "as POSTHORSE_CONNECTOR_TRANSPORT says: transport is require:tcp; accepted: auto";
    for part in [blamed, "POSTHORSE_ENGINE_TRANSPORT"] {
        assert!(said.contains(part), "{part} is missing in {said}");
    }
    let known = demo("POSTHORSE_TCP_LIVENESS_MS", "4000");
    assert!(known.status.success() && !text(&known.stderr).contains("overrides nothing"));
    for name in ["POSTHORSE_TCP_LIVENESS", "POSTHORSE_CONNECTOR_LIVENESS"] {
        let unknown = demo(name, "4000");
        let said = text(&unknown.stderr);
        assert!(unknown.status.success(), "{said}");
        assert!(said.contains(&format!("the variable {name} is set, and overrides nothing")), "{said}");
    }
}

#[test]
fn nobody_who_reads_is_no_reason_to_panic() {
    let full = || fs::File::options().write(true).open("/dev/full").unwrap();
    let closed = || std::io::pipe().unwrap().1;
    for (arguments, status) in [
        (&["demo", "--size", "1"][..], 2),
        (&["gallop"], 2),
        (&["demo", "--size", "57344", "--count", "1", "--json"], 0),
        (&["soak", "--duration", "50ms", "--threads", "1", "--max-size", "4KiB", "--pool", "1MiB"], 0),
        (&["bench", "omni", "--transport", "tcp", "--block", "57344", "--duration", "1ms"], 0),
    ] {
        let ended = |stderr: Stdio| {
            let output = posthorse(arguments).env("POSTHORSE_LOG", "trace").stderr(stderr).output().unwrap();
            assert_eq!(output.status.code(), Some(status), "{arguments:?}");
        };
        ended(full().into());
        ended(closed().into());
    }
    for arguments in [&["--help"][..], &["demo", "--size", "57344", "--count", "1"]] {
        let status = posthorse(arguments).stdout(full()).stderr(full()).status().unwrap();
        assert!(matches!(status.code(), Some(0 | 1)), "{arguments:?}: {status}");
    }
}

#[test]
fn a_second_process_that_is_stopped_is_reported() {
    let mut parent =
        posthorse(&["demo", "--json", "--count", "1000000", "--size", "57344", "--transport", "tcp"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
    let mut lines = BufReader::new(parent.stdout.take().unwrap());
    lines.read_line(&mut String::new()).unwrap();
    let children = format!("/proc/{0}/task/{0}/children", parent.id());
    let child = fs::read_to_string(children).unwrap();
    let child = Pid::from_raw(child.split_whitespace().next().unwrap().parse().unwrap()).unwrap();
    kill_process(child, Signal::STOP).unwrap();
    let begin = Instant::now();
    lines.read_to_end(&mut Vec::new()).unwrap();
    let output = parent.wait_with_output().unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("the consumer has not answered and is stopped"), "{said}");
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}

#[test]
fn help_has_examples_and_the_version_is_said() {
    for arguments in [&["demo", "--help"][..], &["soak", "--help"], &["bench", "target", "--help"]] {
        assert!(printed(arguments).contains("KiB, MiB, GiB, TiB (powers of 1024)"), "{arguments:?}");
    }
    for bench in ["local", "initiator", "omni"] {
        let help = printed(&["bench", bench, "--help"]);
        for part in ["separated by commas", "GiB, TiB (powers of 1024)", "us, ms, s, m, h"] {
            assert!(help.contains(part), "{part} is missing in {help}");
        }
    }
    assert!(printed(&["demo", "--help"]).contains("posthorse demo --transport tcp"));
    assert!(printed(&["bench", "--help"]).contains("posthorse bench report rows.jsonl"));
    assert!(printed(&["soak", "--help"]).contains("--chaos"));
    assert_eq!(printed(&["--version"]), format!("posthorse {}\n", env!("CARGO_PKG_VERSION")));
    assert!(!printed(&["--help"]).contains("consumer"), "the second processes are nobody's business");
}

const ROW: [&str; 15] = [
    "suite",
    "transport",
    "op",
    "block_bytes",
    "batch",
    "threads",
    "gb_per_s",
    "ops_per_s",
    "p50_us",
    "p99_us",
    "cpu_s_per_gb",
    "limit",
    "limit_gb_per_s",
    "limit_p50_us",
    "ratio_to_limit",
];

fn check_rows(rows: &[Value], suite: &str) {
    for row in rows {
        let (mut found, mut fields) = (keys(row), ROW.to_vec());
        found.sort_unstable();
        fields.sort_unstable();
        assert_eq!(found, fields);
        assert_eq!(row["suite"], suite);
        for field in ROW {
            let value = &row[field];
            assert!(value.is_string() || value.as_f64().is_some_and(|value| value > 0.0), "{field} in {row}");
        }
    }
}

#[test]
fn bench_local_measures_every_cell_and_report_shows_it() {
    let folder = tempfile::tempdir().unwrap();
    let (rows, page) = (folder.path().join("rows.jsonl"), folder.path().join("report.html"));
    fs::write(&rows, "what was there before\n").unwrap();
    let (rows, page) = (rows.to_str().unwrap(), page.to_str().unwrap());
    let table = printed(&[
        "bench",
        "local",
        "--memory",
        "8MiB",
        "--block",
        "4KiB,100KB",
        "--batch",
        "1,3",
        "--threads",
        "1,2",
        "--duration",
        "10ms",
        "--json",
        rows,
    ]);
    let measured = json_lines(&fs::read_to_string(rows).unwrap());
    assert_eq!(measured.len(), 2 * 2 * 2 * 2 * 2);
    assert_eq!(table.lines().count(), 2 + measured.len());
    check_rows(&measured, "local");
    for (transport, op) in [("shm", "read"), ("shm", "write"), ("tcp", "read"), ("tcp", "write")] {
        let of_both = measured.iter().filter(|row| row["transport"] == transport && row["op"] == op);
        assert_eq!(of_both.count(), 8, "{transport} {op}");
    }
    printed(&["bench", "report", rows, "-o", page]);
    let page = fs::read_to_string(page).unwrap();
    assert_eq!(page.matches("<svg").count(), 4 * 3);
    assert_eq!(page.matches("<td>4 KiB</td>").count(), 16);
}

#[test]
fn bench_omni_measures_every_mode() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    let rows = rows.to_str().unwrap();
    printed(&[
        "bench",
        "omni",
        "--transport",
        "tcp",
        "--block",
        "256KiB",
        "--duration",
        "10ms",
        "--json",
        rows,
    ]);
    let measured = json_lines(&fs::read_to_string(rows).unwrap());
    check_rows(&measured, "omni");
    let modes: Vec<&str> = measured.iter().map(|row| row["op"].as_str().unwrap()).collect();
    assert_eq!(modes, ["zero_copy", "copy", "object"]);
}

/// A target that this test started, and ends.
struct Target(std::process::Child, String);

impl Target {
    fn new(host_id: &str) -> Self {
        let mut child = posthorse(&["bench", "target", "--listen", "127.0.0.1:0", "--memory", "1MiB"])
            .env("POSTHORSE_HOST_ID", host_id)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("listening on ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
        Self(child, address.to_owned())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn the_second_process_does_not_outlive_the_first_however_that_ends() {
    let arguments =
        ["bench", "local", "--memory", "1MiB", "--block", "4KiB", "--batch", "1", "--duration", "1h"];
    let mut parent = posthorse(&arguments).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    let children = format!("/proc/{0}/task/{0}/children", parent.id());
    let deadline = Instant::now() + Duration::from_secs(30);
    let child = loop {
        let list = fs::read_to_string(&children).unwrap();
        if let Some(child) = list.split_whitespace().next().and_then(|id| Pid::from_raw(id.parse().unwrap()))
        {
            // Its memory is another process's as soon as it runs the command.
            let name = fs::read_to_string(format!("/proc/{}/cmdline", child.as_raw_nonzero())).unwrap();
            if name.contains("--announce") {
                break child;
            }
        }
        assert!(Instant::now() < deadline, "no second process");
        std::thread::yield_now();
    };
    let ended = pidfd_open(child, PidfdFlags::empty()).unwrap();
    parent.kill().unwrap();
    parent.wait().unwrap();
    let patience = Duration::from_secs(30).try_into().unwrap();
    let ready = poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&patience)).unwrap();
    assert_eq!(ready, 1, "the second process goes on");
}

#[test]
fn bench_initiator_measures_a_target_and_says_what_is_not_available() {
    let target = Target::new("one host");
    let initiator = |transport: &[&str]| {
        let arguments = ["bench", "initiator", "--target", &target.1, "--block", "4KiB", "--batch", "1"];
        let more = ["--threads", "1", "--op", "write", "--duration", "10ms"];
        posthorse(&[&arguments[..], &more, transport].concat())
            .env("POSTHORSE_HOST_ID", "another")
            .output()
            .unwrap()
    };
    let required = initiator(&["--transport", "shm"]);
    let said = text(&required.stderr);
    assert_eq!(required.status.code(), Some(3), "{said}");
    assert!(said.contains("shm does not reach the target"), "{said}");
    let any = initiator(&[]);
    let (table, said) = (text(&any.stdout), text(&any.stderr));
    assert!(any.status.success(), "{said}");
    assert!(said.contains("left out: shm"), "{said}");
    assert!(table.lines().count() == 3 && table.contains("tcp"), "{table}");
}

#[test]
fn an_initiator_without_a_target_fails_with_the_reason() {
    // Taken and given back: nobody listens there.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let output = output(&["bench", "initiator", "--target", &address]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&address), "{said}");
}

#[test]
fn soak_checks_every_byte_and_ends_with_whole_pools() {
    let arguments =
        ["soak", "--duration", "300ms", "--threads", "4", "--max-size", "256KiB", "--pool", "4MiB"];
    for transport in ["shm", "tcp"] {
        let text = printed(&[&arguments[..], &["--transport", transport]].concat());
        assert!(text.contains("every byte checked") && !text.starts_with("0 puts"), "{text}");
    }
}

#[test]
fn doctor_says_the_same_to_people_and_programs_and_scripts() {
    let json = output(&["doctor", "--json"]);
    let checks: Vec<Value> = serde_json::from_slice(&json.stdout).unwrap();
    let table = text(&output(&["doctor"]).stdout);
    for check in &checks {
        let mut found = keys(check);
        found.sort_unstable();
        assert_eq!(found, ["area", "costs", "found", "mend", "name", "state"]);
        let (state, name) = (check["state"].as_str().unwrap(), check["name"].as_str().unwrap());
        assert!(table.contains(&format!("  {state:<9}{name}: ")), "{name} {state}:\n{table}");
        // Each status of its own.
        let required = output(&["doctor", "--require", name]).status.code();
        assert_eq!(required, Some(i32::from(state != "ok")), "{name} {state}");
    }
    let mendable = checks.iter().any(|check| check["state"] == "limited" && !check["mend"].is_null());
    assert_eq!(json.status.code(), Some(i32::from(mendable)));
    let wrong = output(&["doctor", "--require", "numa,nothing"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        wrong.stdout.is_empty() && text(&wrong.stderr).contains("--require is \"nothing\"; accepted: rdma, ")
    );
}
