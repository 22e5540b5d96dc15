//! One stream of output from the machine: what the command writes, and then the end, with its status.

use std::io::{self, Read, Write};

/// How much is read at once.
const CHUNK: usize = 64 << 10;

/// The longest that may follow the mark of the end: a status and a line feed.
const MAX_STATUS: usize = 8;

/// Copies `from` to `to` until the end, and returns the status; `None` if the stream breaks off before.
///
/// If `to` takes no more, the rest is read and thrown away: the command goes on, as it would with a terminal gone.
pub(super) fn copy(mut from: impl Read, mut to: impl Write, mark: &[u8]) -> Option<u8> {
    let mut splitter = Splitter::new(mark);
    let mut chunk = vec![0; CHUNK];
    let mut open = true;
    loop {
        let read = match from.read(&mut chunk) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => 0,
        };
        let (output, status) =
            if read == 0 { (splitter.rest(), None) } else { splitter.push(&chunk[..read]) };
        open = open && to.write_all(&output).and_then(|()| to.flush()).is_ok();
        if status.is_some() || read == 0 {
            return status;
        }
    }
}

/// Parts the output from what follows the mark.
#[derive(Debug)]
struct Splitter<'a> {
    mark: &'a [u8],
    /// What may be the beginning of the mark, or follows it.
    held: Vec<u8>,
}

impl<'a> Splitter<'a> {
    fn new(mark: &'a [u8]) -> Self {
        Self { mark, held: Vec::new() }
    }

    /// Takes what has come, and returns what is output, and the status once it is there.
    fn push(&mut self, bytes: &[u8]) -> (Vec<u8>, Option<u8>) {
        self.held.extend_from_slice(bytes);
        let begins = |at: &usize| {
            let part = &self.held[*at..self.held.len().min(at + self.mark.len())];
            self.mark.starts_with(part)
        };
        let starts = (0..self.held.len()).filter(|&at| self.held[at] == self.mark[0]);
        let at = starts.into_iter().find(begins).unwrap_or(self.held.len());
        let kept = self.held.split_off(at);
        let output = std::mem::replace(&mut self.held, kept);
        (output, self.status())
    }

    fn status(&self) -> Option<u8> {
        let line = self.held.strip_prefix(self.mark)?;
        let end = line.iter().take(MAX_STATUS).position(|&byte| byte == b'\n')?;
        std::str::from_utf8(&line[..end]).ok()?.trim().parse().ok()
    }

    /// What was held back, when no more comes.
    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: &[u8] = b"aab";

    /// Reads as many bytes at once as it is told.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let length = self.1.min(buffer.len());
            (&mut self.0).take(length as u64).read(buffer)
        }
    }

    #[test]
    fn all_before_the_mark_is_output_however_it_arrives() {
        for step in 1..12 {
            let mut output = Vec::new();
            let status = copy(Slow(b"xaaaaab 101\nmore", step), &mut output, MARK);
            assert_eq!((output.as_slice(), status), (&b"xaaa"[..], Some(101)), "{step}");
        }
    }

    #[test]
    fn a_stream_that_breaks_off_has_no_status_and_loses_nothing() {
        for text in [&b"output aa"[..], b"", b"aab 7"] {
            let mut output = Vec::new();
            assert_eq!(copy(text, &mut output, MARK), None);
            assert_eq!(output, text);
        }
    }

    #[test]
    fn only_what_may_be_the_mark_is_held_back() {
        let mut splitter = Splitter::new(MARK);
        assert_eq!(splitter.push(b"prompt> "), (b"prompt> ".to_vec(), None));
        assert_eq!(splitter.push(b"baa"), (b"b".to_vec(), None));
        assert_eq!(splitter.push(b"c"), (b"aac".to_vec(), None));
    }

    #[test]
    fn a_reader_that_is_gone_does_not_end_the_command() {
        struct Gone;
        impl Write for Gone {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        assert_eq!(copy(Slow(b"a lot of outputaab 3\n", 2), Gone, MARK), Some(3));
    }
}
