//! Words as a shell reads them, whatever bytes they have.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `word` in single quotes.
fn quoted(word: &[u8]) -> Vec<u8> {
    let mut text = vec![b'\''];
    for &byte in word {
        if byte == b'\'' { text.extend_from_slice(b"'\\''") } else { text.push(byte) }
    }
    text.push(b'\'');
    text
}

/// A script that runs `command` in `folder` with `variables`, and with no others.
///
/// `env` sets the variables, not the shell: it takes every name there is, and none of them means anything to it.
pub(super) fn script<'a, K, V>(
    folder: &Path,
    variables: impl IntoIterator<Item = (K, V)>,
    command: impl IntoIterator<Item = &'a OsStr>,
) -> Vec<u8>
where
    K: AsRef<OsStr>,
    V: AsRef<OsStr>,
{
    let mut text = b"cd ".to_vec();
    text.extend(quoted(folder.as_os_str().as_bytes()));
    text.extend_from_slice(b" || exit 125\nexec env -i");
    for (name, value) in variables {
        let assignment = [name.as_ref().as_bytes(), b"=", value.as_ref().as_bytes()].concat();
        text.push(b' ');
        text.extend(quoted(&assignment));
    }
    for word in command {
        text.push(b' ');
        text.extend(quoted(word.as_bytes()));
    }
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn words_and_variables_arrive_as_they_are() {
        let odd = OsStr::from_bytes(b"a b'c\"d\\e$f\n*\xff");
        let program = "printf '%s|' \"$@\" \"$ODD\" \"$PWD\"; printf '%s' \"${HOME-unset}\"";
        let words = ["sh", "-c", program, "sh", ""].map(OsStr::new);
        let text = script(Path::new("/"), [("ODD", odd), ("PATH", OsStr::new("/usr/bin:/bin"))], {
            words.into_iter().chain([odd])
        });
        let output = Command::new("sh").arg("-c").arg(OsStr::from_bytes(&text)).output().unwrap();
        let expected = [b"|", odd.as_bytes(), b"|", odd.as_bytes(), b"|/|unset"].concat();
        assert_eq!(output.stdout, expected, "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn a_folder_that_is_not_there_ends_it() {
        let text = script(Path::new("/no such"), [("A", "B")], [OsStr::new("true")]);
        let output = Command::new("sh").arg("-c").arg(OsStr::from_bytes(&text)).output().unwrap();
        assert_eq!(output.status.code(), Some(125));
    }
}
