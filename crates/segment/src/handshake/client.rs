//! The calling side of the handshake port, for what every peer offers: one request, one connection.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use posthorse_core::{Deadline, Error, ErrorKind, Hello, Result, SegmentDesc};
use tokio::net::{TcpStream, lookup_host};
use tokio::runtime::Handle;
use tokio::time::timeout;

use super::blocking::wait;
use super::config::HandshakeConfig;
use super::message::{EMPTY, Notice, to_json};
use super::stream::{FrameReader, write};
use crate::address::SegmentAddress;
use crate::descriptor::{DescriptorLimits, decode};
use crate::frame::{FrameType, encode};

/// Calls peers by their segment names, Posthorse's own and foreign ones.
///
/// Its methods wait on the calling thread, which must not be one that drives the runtime.
#[derive(Clone)]
pub struct HandshakeClient {
    runtime: Handle,
    config: Arc<HandshakeConfig>,
    hello: Hello,
}

impl HandshakeClient {
    pub(crate) fn new(runtime: Handle, config: HandshakeConfig, hello: Hello) -> Self {
        Self { runtime, config: Arc::new(config), hello }
    }

    /// The peer's descriptor, as it is now.
    ///
    /// # Errors
    /// `InvalidArgument` for a name that is no address; `PeerUnreachable`, `PeerGone`, `PeerRefused`, `Malformed`,
    /// `DeadlineExceeded`; `VersionMismatch` or `FingerprintMismatch` when the two sides cannot work together.
    pub fn metadata(&self, peer: &str, deadline: Deadline) -> Result<SegmentDesc> {
        let json = self.exchange(peer, FrameType::Metadata, EMPTY, deadline)?;
        let named = |error: Error| error.with_peer(peer);
        let desc = decode(&json, &DescriptorLimits::default()).map_err(named)?;
        if let Some(hello) = &desc.hello {
            self.hello.agree(hello).map_err(named)?;
        }
        Ok(desc)
    }

    /// Hands the peer's application a message, said to be from `name`.
    ///
    /// # Errors
    /// As [`HandshakeClient::metadata`]; `PeerRefused` when the application did not take it.
    pub fn notify(&self, peer: &str, name: &str, message: &str, deadline: Deadline) -> Result<()> {
        let notice = to_json(&Notice { name: name.to_owned(), notify_msg: message.to_owned() })?;
        let json = self.exchange(peer, FrameType::Notify, &notice, deadline)?;
        let answer: Notice = serde_json::from_slice(&json).map_err(|error| {
            Error::new(ErrorKind::Malformed, format!("the answer to a notification: {error}")).with_peer(peer)
        })?;
        if answer.notify_msg.is_empty() {
            return Err(
                Error::new(ErrorKind::PeerRefused, "the peer did not take the notification").with_peer(peer)
            );
        }
        Ok(())
    }

    /// Whether the peer's handshake answers.
    ///
    /// # Errors
    /// As [`HandshakeClient::metadata`].
    pub fn probe(&self, peer: &str, deadline: Deadline) -> Result<()> {
        self.exchange(peer, FrameType::Probe, EMPTY, deadline).map(drop)
    }

    /// Asks for an RDMA connection, in Mooncake's JSON, and returns the answer.
    ///
    /// # Errors
    /// As [`HandshakeClient::metadata`].
    pub fn connection(&self, peer: &str, request: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        self.exchange(peer, FrameType::Connection, request, deadline)
    }

    fn exchange(
        &self,
        peer: &str,
        frame_type: FrameType,
        body: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<u8>> {
        let address = SegmentAddress::parse(peer, self.config.default_port)?;
        let frame = encode(frame_type, body, self.config.frame_bytes)?;
        let config = Arc::clone(&self.config);
        wait(&self.runtime, deadline, "the answer to a handshake", async move {
            exchange(&config, &address, frame_type, &frame).await
        })
        .map_err(|error| error.with_peer(peer))
    }
}

impl fmt::Debug for HandshakeClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandshakeClient").field("config", &self.config).finish_non_exhaustive()
    }
}

async fn exchange(
    config: &HandshakeConfig,
    address: &SegmentAddress,
    frame_type: FrameType,
    frame: &[u8],
) -> Result<Vec<u8>> {
    let (read, mut socket) = connect(config, address).await?.into_split();
    write(&mut socket, frame, config.io_timeout()).await?;
    let mut reader = FrameReader::new(read, config.frame_bytes);
    let patience = config.answer_timeout();
    match timeout(patience, reader.next()).await {
        Err(_) => Err(Error::new(ErrorKind::PeerGone, format!("no answer within {patience:?}"))),
        Ok(Err(error)) => Err(error),
        Ok(Ok(None)) => {
            Err(Error::new(ErrorKind::PeerRefused, "the peer closed the connection without an answer"))
        }
        Ok(Ok(Some(answer))) if answer.frame_type == frame_type => Ok(answer.body),
        Ok(Ok(Some(answer))) => {
            let why = format!("the answer to {frame_type:?} is {:?}", answer.frame_type);
            Err(Error::new(ErrorKind::Malformed, why))
        }
    }
}

/// A connection to the first of the host's addresses that takes one.
///
/// # Errors
/// `PeerUnreachable`, with the reason for each address.
pub(crate) async fn connect(config: &HandshakeConfig, address: &SegmentAddress) -> Result<TcpStream> {
    let patience = config.connect_timeout();
    let unreachable = |why: String| Error::new(ErrorKind::PeerUnreachable, why);
    let found = timeout(patience, lookup_host((address.host.as_str(), address.port))).await;
    let addresses: Vec<SocketAddr> = match found {
        Ok(Ok(addresses)) => addresses.collect(),
        Ok(Err(error)) => {
            return Err(unreachable(format!("the host in {address} cannot be resolved: {error}")));
        }
        Err(_) => {
            return Err(unreachable(format!("the host in {address} was not resolved within {patience:?}")));
        }
    };
    let mut reasons = Vec::new();
    for candidate in addresses {
        match timeout(patience, TcpStream::connect(candidate)).await {
            Ok(Ok(stream)) => {
                // Small frames should not wait for more; that it cannot be set costs time alone.
                let _ = stream.set_nodelay(true);
                return Ok(stream);
            }
            Ok(Err(error)) => reasons.push(format!("{candidate}: {error}")),
            Err(_) => reasons.push(format!("{candidate}: no connection within {patience:?}")),
        }
    }
    Err(unreachable(format!("{address} cannot be reached: {}", reasons.join("; "))))
}
