//! Rules on the text of one file.

/// The longest a source file may be. Most should stay far below.
const MAX_LINES: usize = 900;

/// What marks unfinished work. (Written in halves here, so that this file passes its own rule.)
const UNFINISHED: &[&str] = &[
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("to", "do!("),
    concat!("unimplemen", "ted!("),
];

/// Tests that the runner would pass over in silence.
const IGNORED: &[&str] = &[concat!("#[ig", "nore"), concat!("```ig", "nore")];

/// Folders that exist on one machine only.
const MACHINE_PATHS: &[&str] = &[concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];

/// Settings that point a package manager at some registry other than its own default.
const REGISTRIES: &[&str] = &[
    concat!("[regis", "tries"),
    concat!("replace-", "with"),
    concat!("sparse", "+http"),
    concat!("index-", "url"),
    concat!("registry", ".npm"),
    concat!("proxy.", "golang"),
];

/// The faults in the file at `path`, a line each.
pub(super) fn faults(path: &str, content: &str) -> Vec<String> {
    if is_data(path) {
        return Vec::new();
    }
    let mut faults = Vec::new();
    let lines = content.lines().count();
    if path.ends_with(".rs") && lines > MAX_LINES {
        faults.push(format!("{path}: {lines} lines; at most {MAX_LINES}: split it by reason to exist"));
    }
    if !content.is_empty() && !content.ends_with('\n') {
        faults.push(format!("{path}: the last line does not end"));
    }
    for (number, line) in content.split_terminator('\n').enumerate() {
        let mut say = |what: String| faults.push(format!("{path}:{}: {what}", number + 1));
        if line.ends_with([' ', '\t', '\r']) {
            say("whitespace at the end of the line".into());
        }
        if line.contains('\t') {
            say("a tab".into());
        }
        if let Some(mark) = UNFINISHED.iter().find(|mark| is_code(path) && has_word(line, mark)) {
            say(format!("{mark}: finish it, or open an issue"));
        }
        if let Some(mark) = IGNORED.iter().find(|mark| path.ends_with(".rs") && line.contains(**mark)) {
            say(format!(
                "{mark}: a test skips itself by name (posthorse_testkit::skip); a long one is in soak"
            ));
        }
        if let Some(folder) = MACHINE_PATHS.iter().find(|folder| has_path(line, folder)) {
            say(format!("{folder} is a path of one machine"));
        }
        if let Some(registry) = REGISTRIES.iter().find(|registry| line.contains(**registry)) {
            say(format!("{registry}: the source tree names no registry"));
        }
    }
    faults
}

/// Generated, recorded or quoted from elsewhere: not ours to format.
fn is_data(path: &str) -> bool {
    let name = path.rsplit('/').next();
    path == "LICENSE"
        || name == Some("Cargo.lock")
        || path.starts_with("fuzz/corpus/")
        || path.split('/').any(|folder| folder == "testdata")
}

fn is_code(path: &str) -> bool {
    !path.ends_with(".md")
}

/// Whether `word` stands in `line` and is not a part of a longer word.
fn has_word(line: &str, word: &str) -> bool {
    let is_inner = |c: char| c.is_alphanumeric() || c == '_';
    let open_end = !word.ends_with(is_inner);
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_inner) && (open_end || !after.is_some_and(is_inner))
    })
}

/// Whether an absolute path in `line` begins with `folder`.
fn has_path(line: &str, folder: &str) -> bool {
    line.match_indices(folder).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || "._-~}/)*$".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn only(path: &str, content: &str) -> String {
        let mut found = faults(path, content);
        assert_eq!(found.len(), 1, "{content:?}: {found:?}");
        found.remove(0)
    }

    #[test]
    fn a_clean_file_has_no_faults() {
        assert_eq!(faults("a.rs", "fn main() {}\n"), Vec::<String>::new());
        assert_eq!(faults("empty.rs", ""), Vec::<String>::new());
    }

    #[test]
    fn the_length_limit_is_exact_and_for_source_only() {
        assert_eq!(faults("a.rs", &"//\n".repeat(MAX_LINES)), Vec::<String>::new());
        assert!(only("a.rs", &"//\n".repeat(MAX_LINES + 1)).contains("901 lines"));
        assert_eq!(faults("a.md", &"x\n".repeat(MAX_LINES + 1)), Vec::<String>::new());
    }

    #[test]
    fn whitespace_faults_name_their_line() {
        assert!(only("a.md", "x\ny \n").starts_with("a.md:2: whitespace"));
        assert!(only("a.rs", "\tx\n").starts_with("a.rs:1: a tab"));
        assert!(only("a.toml", "x\r\n").contains("whitespace"));
        assert!(only("a.toml", "x").contains("does not end"));
    }

    #[test]
    fn marks_of_unfinished_work_are_words() {
        for mark in UNFINISHED {
            assert!(only("a.rs", &format!("// {mark} later\n")).contains(mark));
            assert_eq!(faults("a.rs", &format!("// my{mark}\n")), Vec::<String>::new());
        }
        assert_eq!(faults("a.rs", &format!("// {}YZ\n", UNFINISHED[2])), Vec::<String>::new());
    }

    #[test]
    fn silent_skips_are_refused() {
        for mark in IGNORED {
            assert!(only("a.rs", &format!("    {mark}\n")).contains("skips itself by name"));
        }
    }

    #[test]
    fn machine_paths_and_registries_are_refused_wherever_they_stand() {
        for folder in MACHINE_PATHS {
            assert!(only("a.md", &format!("see `{folder}x`\n")).contains("one machine"));
            assert!(only(".ci/run", &format!("{folder}x\n")).contains("one machine"));
            assert_eq!(faults("a.md", &format!("see `frame{folder}x`\n")), Vec::<String>::new());
        }
        for registry in REGISTRIES {
            assert!(only(".cargo/config.toml", &format!("{registry}x\n")).contains("registry"));
        }
    }

    #[test]
    fn recorded_data_is_left_alone() {
        for path in ["LICENSE", "fuzz/Cargo.lock", "crates/segment/testdata/a.txt", "fuzz/corpus/kv/a"] {
            assert_eq!(faults(path, "\t x \r"), Vec::<String>::new());
        }
    }
}
