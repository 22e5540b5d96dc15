//! How a command ends when it does not succeed.

use std::process::ExitCode;

/// Why a command failed, and with which exit status.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A check failed; everything about it has been printed already. Status 1.
    Reported,
    /// A check failed for this reason. Status 1.
    Check(String),
    /// The command line is wrong in a way that clap does not see. Status 2.
    Usage(String),
    /// A command that was run ended with this status, and has said why itself.
    Status(u8),
    /// It ends with this status, for this reason.
    Because(u8, String),
    /// This host lacks what the command needs. Status 3.
    Unavailable(String),
}

impl Failure {
    /// What is still to be printed.
    pub(crate) fn message(&self) -> Option<&str> {
        match self {
            Self::Reported | Self::Status(_) => None,
            Self::Check(message)
            | Self::Usage(message)
            | Self::Because(_, message)
            | Self::Unavailable(message) => Some(message),
        }
    }

    /// The exit status of the process.
    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Reported | Self::Check(_) => 1,
            Self::Usage(_) => 2,
            Self::Unavailable(_) => 3,
            Self::Status(status) | Self::Because(status, _) => *status,
        })
    }
}
