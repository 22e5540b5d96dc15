//! What was found, for people and for programs.

use std::fmt::Write;

use serde::Serialize;

use crate::outcome::{Failure, Outcome};

/// As wide as a narrow terminal.
const WIDTH: usize = 80;

/// How something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum State {
    Ok,
    /// It is there, and does less than it could.
    Limited,
    Absent,
    /// The system does not say.
    Unknown,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Limited => "limited",
            Self::Absent => "absent",
            Self::Unknown => "unknown",
        }
    }
}

/// One thing that was looked at. Its form as JSON is documented in the book, on the page Doctor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    pub(super) area: &'static str,
    pub(super) name: &'static str,
    pub(super) state: State,
    pub(super) found: String,
    /// What its lack costs.
    pub(super) costs: Option<String>,
    /// The line that mends it.
    pub(super) mend: Option<String>,
}

impl Check {
    pub(super) fn new(
        area: &'static str,
        name: &'static str,
        state: State,
        found: impl Into<String>,
    ) -> Self {
        // What files and devices say must not steer a terminal.
        let found = found.into().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        Self { area, name, state, found, costs: None, mend: None }
    }

    pub(super) fn costs(self, text: impl Into<String>) -> Self {
        Self { costs: Some(text.into()), ..self }
    }

    pub(super) fn mend(self, text: impl Into<String>) -> Self {
        Self { mend: Some(text.into()), ..self }
    }
}

/// All that was found, by area.
pub(super) fn table(checks: &[Check]) -> String {
    let mut text = String::new();
    let mut area = "";
    for check in checks {
        if check.area != area {
            area = check.area;
            let space = if text.is_empty() { "" } else { "\n" };
            let _ = writeln!(text, "{space}{area}");
        }
        wrap(&mut text, &format!("  {:<9}", check.state.word()), &format!("{}: {}", check.name, check.found));
        if let Some(costs) = &check.costs {
            wrap(&mut text, "           costs: ", costs);
        }
        // In one line, however long, so that it can be copied.
        if let Some(mend) = &check.mend {
            let _ = writeln!(text, "           mend:  {mend}");
        }
    }
    text
}

/// Appends words in lines of at most [`WIDTH`] columns, where no word is longer; those after the first are as far in as
/// what follows `head`.
fn wrap(text: &mut String, head: &str, words: &str) {
    let indent = head.chars().count();
    text.push_str(head);
    let mut column = indent;
    for word in words.split_whitespace() {
        let width = word.chars().count();
        if column > indent && column + 1 + width > WIDTH {
            let _ = write!(text, "\n{:indent$}", "");
            column = indent;
        }
        if column > indent {
            text.push(' ');
            column += 1;
        }
        text.push_str(word);
        column += width;
    }
    text.push('\n');
}

/// Whether the host is as good as it can be: an error names what is required and not ok; without requirements, what is
/// limited and can be mended.
pub(super) fn verdict(checks: &[Check], required: &[String]) -> Outcome {
    for name in required {
        if !checks.iter().any(|check| check.name == name) {
            let names: Vec<&str> = checks.iter().map(|check| check.name).collect();
            return Err(Failure::Usage(format!("--require is {name:?}; accepted: {}", names.join(", "))));
        }
    }
    let lacks = |check: &&Check| match required.is_empty() {
        true => check.state == State::Limited && check.mend.is_some(),
        false => check.state != State::Ok && required.iter().any(|name| name == check.name),
    };
    let found: Vec<String> =
        checks.iter().filter(lacks).map(|check| format!("{} ({})", check.name, check.state.word())).collect();
    if found.is_empty() {
        return Ok(());
    }
    let what = if required.is_empty() { "can be mended" } else { "required and not ok" };
    Err(Failure::Failed(format!("{what}: {}", found.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks() -> Vec<Check> {
        vec![
            Check::new("RDMA", "rdma", State::Absent, "none")
                .costs("hosts talk over TCP")
                .mend("plug one in"),
            Check::new("Memory", "numa", State::Ok, "word ".repeat(30)),
            Check::new("Memory", "huge_pages", State::Limited, "a\u{1b}[31mb"),
        ]
    }

    #[test]
    fn the_table_is_narrow_and_by_area() {
        let text = table(&checks());
        assert!(
            text.starts_with(
                "RDMA\n  absent   rdma: none\n           costs: hosts talk over TCP\n\
             \x20          mend:  plug one in\n\nMemory\n"
            ),
            "{text}"
        );
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        assert!(text.contains("\n           word word"), "{text}");
        assert!(!text.contains('\u{1b}'));
        let json = serde_json::to_value(&checks()[0]).unwrap();
        assert_eq!(json["state"], "absent");
        assert_eq!(json["mend"], "plug one in");
    }

    #[test]
    fn the_verdict_is_about_what_can_be_mended_or_is_required() {
        let mut checks = checks();
        assert_eq!(verdict(&checks, &[]), Ok(()), "nothing mends what is limited");
        checks[2] = checks[2].clone().mend("more");
        let failed = |text: &str| Err(Failure::Failed(text.to_owned()));
        assert_eq!(verdict(&checks, &[]), failed("can be mended: huge_pages (limited)"));
        assert_eq!(verdict(&checks, &["numa".into()]), Ok(()));
        let required = ["rdma".into(), "numa".into()];
        assert_eq!(verdict(&checks, &required), failed("required and not ok: rdma (absent)"));
        let Err(Failure::Usage(text)) = verdict(&checks, &["tcp".into()]) else { panic!() };
        assert_eq!(text, "--require is \"tcp\"; accepted: rdma, numa, huge_pages");
    }
}
