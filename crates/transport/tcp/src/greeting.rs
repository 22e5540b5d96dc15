//! A connection that was accepted and has not yet said whose it is.

use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use posthorse_core::{Error, ErrorKind, Result};
use rustix::net::RecvFlags;

use crate::hello::Call;
use crate::watched::Watched;
use crate::wire::{self, OPENING_BYTES};

/// Such a connection. Nothing beyond its opening is received.
#[derive(Debug)]
pub(crate) struct Greeting {
    socket: Watched<TcpStream>,
    bytes: Vec<u8>,
    since: Instant,
}

/// How far it has come.
#[derive(Debug)]
pub(crate) enum Step {
    /// More has to come.
    More,
    /// It is one of ours.
    Call(Box<Call>),
}

impl Greeting {
    pub(crate) fn new(socket: Watched<TcpStream>) -> Self {
        Self { socket, bytes: Vec::new(), since: Instant::now() }
    }

    pub(crate) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    pub(crate) fn into_socket(self) -> Watched<TcpStream> {
        self.socket
    }

    /// Receives what is there.
    ///
    /// # Errors
    /// `Malformed` when it is no opening of ours, `PathFailed` when the connection ended.
    pub(crate) fn step(&mut self) -> Result<Step> {
        loop {
            let known = wire::opening_len(&self.bytes)?;
            let have = self.bytes.len();
            if let Some(len) = known
                && have == len
            {
                return Ok(Step::Call(Box::new(Call::decode(&self.bytes[OPENING_BYTES..])?)));
            }
            let wanted = known.unwrap_or(OPENING_BYTES);
            self.bytes.resize(wanted, 0);
            let received = rustix::net::recv(&*self.socket, &mut self.bytes[have..], RecvFlags::DONTWAIT);
            let (received, outcome) = match received {
                Ok((_, 0)) => (
                    0,
                    Some(Err(Error::new(ErrorKind::PathFailed, "the peer left before it said who it is"))),
                ),
                Ok((_, received)) => (received, None),
                Err(error) if io::Error::from(error).kind() == io::ErrorKind::WouldBlock => {
                    (0, Some(Ok(Step::More)))
                }
                Err(error) => (0, Some(Err(Error::os("receiving an opening", &error.into())))),
            };
            self.bytes.truncate(have + received);
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
    }
}
