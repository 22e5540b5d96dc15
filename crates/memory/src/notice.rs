//! What an allocation had to do without.

use std::fmt;

/// Something that an allocation was asked for and could not have, though the memory works without it.
///
/// Each notice is also logged once, as a `tracing` warning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    message: String,
    advice: &'static str,
}

impl Notice {
    pub(crate) fn new(message: String, advice: &'static str) -> Self {
        tracing::warn!(advice, "{message}");
        Self { message, advice }
    }

    /// What is missing, why, and what was done instead.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// How to get it.
    pub fn advice(&self) -> &str {
        self.advice
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.message, self.advice)
    }
}
