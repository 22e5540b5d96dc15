//! Adding up the steps, and saying so.

use std::fmt::Write;
use std::time::Duration;

use super::count::Tally;
use super::skips::{Skip, SkipList};

/// The outcome of one step.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Verdict {
    tally: Tally,
    skips: Vec<Skip>,
    /// What a failure is explained with; printed only if there is one.
    output: String,
}

impl Verdict {
    /// A step that is a single case.
    pub(super) fn one(passed: bool, output: String) -> Self {
        let tally = Tally { passed: u64::from(passed), failed: u64::from(!passed) };
        Self { tally, skips: Vec::new(), output }
    }

    /// A step that ran test cases.
    pub(super) fn cases(tally: Tally, output: String) -> Self {
        Self { tally, skips: Vec::new(), output }
    }

    /// Some of the cases say that they skipped themselves: to the runner they had passed.
    pub(super) fn with_self_skipped(mut self, skips: Vec<Skip>) -> Self {
        self.tally.passed = self.tally.passed.saturating_sub(skips.len() as u64);
        self.skips.extend(skips);
        self
    }

    /// The runner passed over this many cases by itself.
    pub(super) fn with_ignored(mut self, step: &str, ignored: u64) -> Self {
        self.skips.extend((0..ignored).map(|_| Skip::new(step, "a case is ignored by the test runner")));
        self
    }

    /// The outcome of two commands of one step.
    pub(super) fn and(mut self, other: Self) -> Self {
        if other.tally.failed > 0 {
            self.output.push_str(&other.output);
        }
        if self.tally.failed == 0 && other.tally.failed == 0 {
            self.output.clear();
        }
        self.tally.passed += other.tally.passed;
        self.tally.failed += other.tally.failed;
        self.skips.extend(other.skips);
        self
    }
}

/// The sum of all steps so far.
#[derive(Debug, Default)]
pub(super) struct Report {
    total: Tally,
    skipped: Vec<Skip>,
    failed_steps: Vec<String>,
    /// What may be skipped; without a list, anything may.
    allowed: Option<SkipList>,
}

impl Report {
    pub(super) fn new(allowed: Option<SkipList>) -> Self {
        Self { allowed, ..Self::default() }
    }

    /// Adds a step that was carried out, and returns the lines that tell of it.
    pub(super) fn step(&mut self, name: &str, took: Duration, verdict: Verdict) -> String {
        let Verdict { tally, skips, output } = verdict;
        let mut lines: Vec<String> = skips.into_iter().map(|skip| self.skip(skip)).collect();
        self.total.passed += tally.passed;
        self.total.failed += tally.failed;
        let word = if tally.failed > 0 { "FAIL" } else { "ok  " };
        let mut line = format!("{word}  {name}  {:.1} s", took.as_secs_f64());
        if tally.passed + tally.failed != 1 {
            let _ = write!(line, "  ({} passed, {} failed)", tally.passed, tally.failed);
        }
        lines.push(line);
        if tally.failed > 0 {
            lines.push(output.trim_end().to_owned());
            self.failed_steps.push(name.to_owned());
        }
        lines.join("\n")
    }

    /// Adds one case, or a whole step, that was skipped, and returns the line that tells of it.
    pub(super) fn skip(&mut self, skip: Skip) -> String {
        if self.allowed.as_ref().is_none_or(|list| list.contains(&skip.name)) {
            let line = format!("skip  {skip}");
            self.skipped.push(skip);
            line
        } else {
            let line = format!("FAIL  {skip}: a skip that .ci/skips does not list");
            self.total.failed += 1;
            self.failed_steps.push(skip.name);
            line
        }
    }

    /// The closing lines, and whether all is well.
    pub(super) fn finish(&self) -> (String, bool) {
        let mut text = String::new();
        for name in self.allowed.iter().flat_map(SkipList::names) {
            if !self.skipped.iter().any(|skip| skip.name == name) {
                let _ = writeln!(text, "note  {name} was not skipped: .ci/skips need not list it");
            }
        }
        if !self.failed_steps.is_empty() {
            let _ = writeln!(text, "failed: {}", self.failed_steps.join(", "));
        }
        let Tally { passed, failed } = self.total;
        let _ = write!(text, "{passed} passed, {failed} failed, {} skipped", self.skipped.len());
        (text, failed == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_millis(1234);

    fn cases(passed: u64, failed: u64) -> Verdict {
        Verdict::cases(Tally { passed, failed }, "the output\n".into())
    }

    #[test]
    fn each_step_is_one_line_and_the_last_line_counts_cases() {
        let mut report = Report::new(None);
        assert_eq!(report.step("fmt", SECOND, Verdict::one(true, "noise".into())), "ok    fmt  1.2 s");
        assert_eq!(report.step("tests", SECOND, cases(40, 0)), "ok    tests  1.2 s  (40 passed, 0 failed)");
        assert_eq!(report.finish(), ("41 passed, 0 failed, 0 skipped".into(), true));
    }

    #[test]
    fn a_failure_shows_its_output_and_is_named_again_at_the_end() {
        let mut report = Report::new(None);
        assert_eq!(
            report.step("tests", SECOND, cases(3, 2)),
            "FAIL  tests  1.2 s  (3 passed, 2 failed)\nthe output"
        );
        assert_eq!(report.finish(), ("failed: tests\n3 passed, 2 failed, 0 skipped".into(), false));
    }

    #[test]
    fn skips_are_named_and_counted_apart_from_what_passed() {
        let mut report = Report::new(None);
        let step =
            cases(5, 0).with_self_skipped(vec![Skip::new("numa", "one node")]).with_ignored("tests", 1);
        assert_eq!(
            report.step("tests", SECOND, step),
            "skip  numa: one node\nskip  tests: a case is ignored by the test runner\n\
             ok    tests  1.2 s  (4 passed, 0 failed)"
        );
        assert_eq!(report.skip(Skip::new("miri", "absent")), "skip  miri: absent");
        assert_eq!(report.finish(), ("4 passed, 0 failed, 3 skipped".into(), true));
    }

    #[test]
    fn in_ci_a_skip_fails_unless_it_is_listed_and_a_listed_one_that_ran_is_noted() {
        let mut report = Report::new(Some(SkipList::parse("miri: absent\nold: gone\n").unwrap()));
        report.skip(Skip::new("miri", "absent"));
        let line = report.skip(Skip::new("deny", "absent"));
        assert_eq!(line, "FAIL  deny: absent: a skip that .ci/skips does not list");
        let (text, good) = report.finish();
        assert_eq!(
            text,
            "note  old was not skipped: .ci/skips need not list it\nfailed: deny\n0 passed, 1 failed, 1 skipped"
        );
        assert!(!good);
    }

    #[test]
    fn the_commands_of_a_step_add_up_and_only_failures_keep_their_output() {
        let sum = Verdict::default().and(cases(2, 0)).and(cases(1, 1));
        assert_eq!(sum.tally, Tally { passed: 3, failed: 1 });
        assert_eq!(sum.output, "the output\n");
        assert_eq!(Verdict::default().and(cases(2, 0)).output, "");
    }
}
