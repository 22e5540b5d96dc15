//! What `test` runs, in order.

use std::fmt;
use std::io;
use std::process::{Command, Stdio};

use cargo_metadata::{Metadata, Package};

use crate::{layers, tidy};

/// One thing to check, reported in one line.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) name: &'static str,
    /// What the host must have; without it the step is skipped, by name.
    pub(super) needs: Vec<Need>,
    pub(super) work: Work,
    pub(super) count: Count,
}

/// How a step is carried out.
#[derive(Debug)]
pub(super) enum Work {
    /// In this process: returns the faults found.
    Check(fn(&Metadata) -> io::Result<Vec<String>>),
    /// By other programs, one after the other.
    Commands(Vec<Invocation>),
}

/// What the cases of a step are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Count {
    /// Each command is one case.
    Step,
    /// The tests that cargo-nextest ran.
    Nextest,
    /// The tests that the standard harness ran.
    Libtest,
}

/// A program with its arguments and variables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Invocation {
    words: Vec<String>,
    variables: Vec<(&'static str, String)>,
}

impl Invocation {
    /// The command as one would type it; no word may contain a space.
    fn of(words: &str) -> Self {
        Self { words: words.split_whitespace().map(str::to_owned).collect(), variables: Vec::new() }
    }

    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.variables.push((name, value.to_owned()));
        self
    }

    /// With `value` unless the caller's environment has one already.
    fn with_default(self, name: &'static str, value: &str) -> Self {
        if std::env::var_os(name).is_some() { self } else { self.with(name, value) }
    }

    pub(super) fn process(&self) -> Command {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).env("CARGO_TERM_COLOR", "never").envs(self.variables.iter().cloned());
        command
    }

    fn succeeds(&self) -> bool {
        let quiet = self.process().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        quiet.is_ok_and(|status| status.success())
    }
}

impl fmt::Display for Invocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.variables {
            write!(f, "{name}='{value}' ")?;
        }
        f.write_str(&self.words.join(" "))
    }
}

/// Something that a step cannot do without.
#[derive(Debug)]
pub(super) struct Need {
    /// Succeeds where it is there.
    probe: Invocation,
    /// What to say where it is not.
    otherwise: &'static str,
}

impl Need {
    fn new(probe: &str, otherwise: &'static str) -> Self {
        Self { probe: Invocation::of(probe), otherwise }
    }

    /// Whether it is there; if not, the reason for the skip.
    pub(super) fn met(&self) -> Result<(), String> {
        if self.probe.succeeds() { Ok(()) } else { Err(self.otherwise.to_owned()) }
    }
}

/// The steps for the workspace `metadata`; `all` adds what needs more than any Linux machine has.
pub(super) fn steps(metadata: &Metadata, all: bool) -> Vec<Step> {
    let nextest = Invocation::of("cargo nextest --version").succeeds();
    let mut steps = vec![
        step("fmt", "cargo fmt --all --check")
            .needing(Need::new("cargo fmt --version", "rustfmt is not installed")),
        step("clippy", "cargo clippy --quiet --workspace --all-targets -- -D warnings")
            .needing(Need::new("cargo clippy --version", "clippy is not installed")),
        commands(
            "docs",
            vec![
                Invocation::of("cargo doc --quiet --workspace --no-deps").with("RUSTDOCFLAGS", "-D warnings"),
            ],
        ),
        check("layers", |metadata| Ok(layers::check(metadata))),
        check("tidy", tidy::check),
        step("deny", "cargo deny --color never check bans licenses sources").needing(cargo_deny()),
        step("advisories", "cargo deny --color never check --disable-fetch advisories")
            .needing(cargo_deny())
            // A network that swallows packets would otherwise hold everything up.
            .needing(Need::new("timeout 60 cargo deny fetch db", "the advisory database cannot be reached")),
        // Their own tests run them.
        step("pipelines", "cargo build --quiet --workspace --example two_stage --example three_stage"),
        tests(nextest),
        step("doctests", "cargo test --quiet --workspace --doc --no-fail-fast").counting(Count::Libtest),
    ];
    steps.extend(rdma(metadata));
    if all {
        steps.extend(loom(metadata));
        steps.extend(miri(metadata));
        steps.push(step("examples", "cargo build --quiet --workspace --examples"));
        steps.extend(benches(metadata));
        steps.push(fuzz(metadata));
        steps.push(vm());
        steps.extend(rdma_devices(metadata));
    }
    steps
}

/// The unit and integration tests. Other examples and benchmarks are not built here: clippy has seen them.
fn tests(nextest: bool) -> Step {
    if nextest {
        let runner = "cargo nextest run --cargo-quiet --workspace --lib --bins --tests --no-fail-fast \
                      --status-level fail --final-status-level fail --hide-progress-bar --color never";
        step("tests", runner).counting(Count::Nextest)
    } else {
        step("tests", "cargo test --quiet --workspace --lib --bins --tests --no-fail-fast")
            .counting(Count::Libtest)
    }
}

/// What the feature `rdma` adds to the transport of that name, as far as it needs no device: in a build folder of its
/// own, since with it on the whole workspace would be built twice.
fn rdma(metadata: &Metadata) -> [Step; 2] {
    let folder = metadata.target_directory.join("rdma");
    let of = |name, words: &str| {
        let invocation = Invocation::of(words).with("CARGO_TARGET_DIR", folder.as_str());
        commands(name, vec![invocation]).needing_verbs()
    };
    let clippy = "cargo clippy --quiet --package posthorse-rdma --features rdma --all-targets -- -D warnings";
    let tests = "cargo test --quiet --package posthorse-rdma --features rdma --no-fail-fast \
                 --lib --test library --test layout";
    [
        of("rdma-clippy", clippy).needing(Need::new("cargo clippy --version", "clippy is not installed")),
        of("rdma-tests", tests).counting(Count::Libtest),
    ]
}

/// The models of what synchronises, in each crate that uses loom, in a build folder of their own.
fn loom(metadata: &Metadata) -> Option<Step> {
    let folder = metadata.target_directory.join("loom");
    let models: Vec<Invocation> = metadata
        .packages
        .iter()
        .filter(|package| package.dependencies.iter().any(|dependency| dependency.name == "loom"))
        .map(|package| {
            Invocation::of(&format!(
                "cargo test --quiet --release --lib --no-fail-fast --package {}",
                package.name
            ))
            .with("RUSTFLAGS", "--cfg loom")
            .with("CARGO_TARGET_DIR", folder.as_str())
            .with_default("LOOM_MAX_PREEMPTIONS", "3")
        })
        .collect();
    (!models.is_empty()).then(|| commands("loom", models).counting(Count::Libtest))
}

/// The unit tests of each crate that asks for it, under Miri.
fn miri(metadata: &Metadata) -> Option<Step> {
    let folder = metadata.target_directory.join("miri");
    let runs: Vec<Invocation> = metadata
        .packages
        .iter()
        .filter(|package| wants_miri(package))
        .map(|package| {
            Invocation::of(&format!(
                "rustup run nightly cargo miri test --quiet --lib --package {}",
                package.name
            ))
            .with("CARGO_TARGET_DIR", folder.as_str())
            .with_default("MIRIFLAGS", "-Zmiri-strict-provenance")
        })
        .collect();
    (!runs.is_empty()).then(|| {
        commands("miri", runs).counting(Count::Libtest).needing(Need::new(
            "rustup run nightly cargo miri --version",
            "there is no nightly toolchain with Miri",
        ))
    })
}

/// Whether a crate's Cargo.toml has `[package.metadata.posthorse]` with `miri = true`.
fn wants_miri(package: &Package) -> bool {
    package.metadata.pointer("/posthorse/miri").and_then(|wish| wish.as_bool()) == Some(true)
}

/// Every benchmark once, to see that it still runs; it measures nothing here.
fn benches(metadata: &Metadata) -> Option<Step> {
    let has_benches = metadata.packages.iter().any(|p| p.targets.iter().any(|target| target.is_bench()));
    has_benches.then(|| step("benches", "cargo test --quiet --workspace --bench *"))
}

/// The fuzz targets, which stand outside of the workspace: that they build, and what clippy says of the decoders' side of
/// them.
fn fuzz(metadata: &Metadata) -> Step {
    let folder = metadata.target_directory.join("fuzz-check");
    let clippy = Invocation::of("cargo clippy --quiet --manifest-path fuzz/Cargo.toml -- -D warnings");
    commands("fuzz", vec![clippy.with("CARGO_TARGET_DIR", folder.as_str())])
        .needing(Need::new("cargo clippy --version", "clippy is not installed"))
        .needing(Need::new("c++ --version", "there is no C++ compiler for libFuzzer"))
}

/// What `vm` promises, in machines that are booted for it.
fn vm() -> Step {
    let test = "cargo test --quiet --package xtask --features vm-tests --test vm -- --test-threads=2";
    step("vm", test).counting(Count::Libtest).needing_machines()
}

/// The tests of what needs RDMA devices, and the demo over RDMA, each in a machine of `vm` that is booted for it.
fn rdma_devices(metadata: &Metadata) -> [Step; 2] {
    let folder = metadata.target_directory.join("rdma");
    let xtask = std::env::current_exe().unwrap_or_else(|_| "xtask".into());
    let runner = format!("{} vm --hosts 2 --rails 2 --cpus 2 --timeout 900 --", xtask.display());
    // The only architecture for which there are machines.
    let in_machine = |words: &str| {
        Invocation::of(words)
            .with("CARGO_TARGET_DIR", folder.as_str())
            .with("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER", &runner)
    };
    let tests = "cargo test --quiet --no-fail-fast --package posthorse-rdma --package posthorse-engine \
                 --features posthorse-rdma/rdma,posthorse-engine/rdma \
                 --test verbs --test leaks --test devices --test rdma_vm";
    let demo = "cargo run --quiet --package posthorse-cli --features rdma -- \
                demo --transport rdma --size 4MiB --count 2";
    [
        commands("rdma-devices", vec![in_machine(tests)]).counting(Count::Libtest),
        commands("rdma-demo", vec![in_machine(demo)]),
    ]
    .map(|step| step.needing_verbs().needing_machines())
}

fn cargo_deny() -> Need {
    Need::new("cargo deny --version", "cargo-deny is not installed")
}

fn step(name: &'static str, command: &str) -> Step {
    commands(name, vec![Invocation::of(command)])
}

fn commands(name: &'static str, commands: Vec<Invocation>) -> Step {
    Step { name, needs: Vec::new(), work: Work::Commands(commands), count: Count::Step }
}

fn check(name: &'static str, check: fn(&Metadata) -> io::Result<Vec<String>>) -> Step {
    Step { name, needs: Vec::new(), work: Work::Check(check), count: Count::Step }
}

impl Step {
    fn needing(mut self, need: Need) -> Self {
        self.needs.push(need);
        self
    }

    /// What the feature `rdma` is built with.
    fn needing_verbs(self) -> Self {
        self.needing(Need::new(
            "pkg-config --exists libibverbs librdmacm",
            "the headers of libibverbs and librdmacm are not installed (libibverbs-dev, librdmacm-dev)",
        ))
        // What the bindings are made with looks for the library alone.
        .needing(Need::new("grep -q libclang /etc/ld.so.cache", "there is no libclang (libclang-dev)"))
    }

    /// What `vm` needs.
    fn needing_machines(self) -> Self {
        self.needing(Need::new("qemu-system-x86_64 --version", "there is no QEMU (qemu-system-x86)"))
            .needing(Need::new("busybox true", "there is no busybox (busybox-static)"))
            .needing(Need::new("xz --version", "there is no xz (xz-utils)"))
            .needing(Need::new("zstd --version", "there is no zstd (zstd)"))
            .needing(Need::new("setpriv --version", "there is no setpriv (util-linux)"))
            .needing(Need::new(
                "test -x /usr/bin/ibv_rc_pingpong",
                "there is no ibv_rc_pingpong (ibverbs-utils)",
            ))
            .needing(Need::new(
                "apt-cache show linux-image-amd64",
                "apt-get knows no kernel to fetch: the host is no Debian, or `apt-get update` was never run",
            ))
    }

    fn counting(mut self, count: Count) -> Self {
        self.count = count;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn all_only_adds_to_the_plan() {
        let metadata = workspace::load(None).unwrap();
        let name = |step: &Step| step.name;
        let plain: Vec<_> = steps(&metadata, false).iter().map(name).collect();
        let all: Vec<_> = steps(&metadata, true).iter().map(name).collect();
        assert_eq!(all[..plain.len()], plain);
        assert!(all.contains(&"examples") && !plain.contains(&"examples"));
    }

    #[test]
    fn an_unmet_need_gives_its_reason() {
        assert_eq!(Need::new("true", "no truth").met(), Ok(()));
        assert_eq!(Need::new("false", "no truth").met(), Err("no truth".into()));
        assert_eq!(Need::new("posthorse-no-such-program", "absent").met(), Err("absent".into()));
    }

    #[test]
    fn a_command_is_shown_as_one_would_type_it() {
        let invocation = Invocation::of("cargo doc  --no-deps").with("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(invocation.to_string(), "RUSTDOCFLAGS='-D warnings' cargo doc --no-deps");
    }

    #[test]
    fn without_nextest_the_standard_harness_counts() {
        assert_eq!(tests(true).count, Count::Nextest);
        assert_eq!(tests(false).count, Count::Libtest);
    }
}
