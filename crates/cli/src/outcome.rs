//! How the command ends when it does not succeed.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

/// Why the command failed, and with which exit status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A transfer or check failed for this reason. Status 1.
    Failed(String),
    /// The command line asks for what cannot be. Status 2, as for what clap finds itself.
    Usage(String),
    /// This host lacks what the command needs. Status 3.
    Unavailable(String),
}

/// A result of a part of the command.
pub(crate) type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// The exit status of the process.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Failed(_) => 1,
            Self::Usage(_) => 2,
            Self::Unavailable(_) => 3,
        })
    }

    /// What is to be printed.
    pub(crate) fn message(&self) -> &str {
        match self {
            Self::Failed(message) | Self::Usage(message) | Self::Unavailable(message) => message,
        }
    }

    /// The failure of `what` by the operating system.
    pub(crate) fn io(what: impl fmt::Display) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Failed(format!("{what}: {error}"))
    }
}

/// Writes to standard output, where whoever reads may be gone.
pub(crate) fn print(text: &str) -> Outcome {
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes()).and_then(|()| output.flush()).map_err(Failure::io("write the results"))
}

/// Writes a line to standard error. Whoever reads it may be gone, which is no reason to end.
pub(crate) fn note(text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

impl From<posthorse_core::Error> for Failure {
    fn from(error: posthorse_core::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_failure_has_its_exit_status() {
        let code = |failure: Failure| format!("{:?}", failure.exit_code());
        let status = |status: u8| format!("{:?}", ExitCode::from(status));
        assert_eq!(code(Failure::Failed("x".into())), status(1));
        assert_eq!(code(Failure::Usage("x".into())), status(2));
        assert_eq!(code(Failure::Unavailable("x".into())), status(3));
        assert_eq!(Failure::Usage("x".into()).message(), "x");
    }
}
