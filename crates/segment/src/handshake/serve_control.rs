//! The serving side of a control connection between Posthorse peers.

use std::sync::Arc;
use std::time::Duration;

use posthorse_core::{Error, ErrorKind, Result};
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::local::Local;
use super::message::{Control, Greeting, Refusal};
use super::server::Progress;
use super::stream::{FrameReader, write};
use crate::address::shown;
use crate::frame::{FrameType, encode};

/// Answers that may wait until the socket takes them.
const ANSWERS: usize = 64;

pub(crate) async fn serve(
    mut reader: FrameReader,
    mut socket: OwnedWriteHalf,
    first: Vec<u8>,
    local: Arc<Local>,
    progress: &Progress,
) -> Result<()> {
    let patience = local.config.io_timeout();
    let Control::Greeting(peer) = Control::decode(&first)? else {
        return Err(Error::new(ErrorKind::Malformed, "a control connection began without a greeting"));
    };
    drop(first);
    let slot = local.control_slots.clone().try_acquire_owned().map_err(|_| {
        let text =
            "the peer serves as many control connections as it may (control_connections, ulimit -n) already";
        Error::new(ErrorKind::LimitReached, text)
    });
    let admitted = local.greeting.hello.agree(&peer.hello).and(slot);
    let (answer, slot) = match admitted {
        Ok(slot) => (Control::Greeting(local.greeting.clone()), Ok(slot)),
        Err(error) => (refusal(0, &error), Err(error)),
    };
    progress.answer();
    write(&mut socket, &frame(&answer, &local)?, patience).await?;
    let _slot = slot?;
    if !progress.settle() {
        return Ok(());
    }

    let (answers, outgoing) = mpsc::channel(ANSWERS);
    tokio::select! {
        ended = requests(&mut reader, &peer, &local, answers) => ended,
        ended = write_all(&mut socket, outgoing, patience) => ended,
    }
}

/// Writes frames until their senders are gone or the connection breaks.
pub(crate) async fn write_all(
    socket: &mut OwnedWriteHalf,
    mut outgoing: mpsc::Receiver<Vec<u8>>,
    patience: Duration,
) -> Result<()> {
    while let Some(frame) = outgoing.recv().await {
        write(socket, &frame, patience).await?;
    }
    Ok(())
}

async fn requests(
    reader: &mut FrameReader,
    peer: &Greeting,
    local: &Arc<Local>,
    answers: mpsc::Sender<Vec<u8>>,
) -> Result<()> {
    let name: Arc<str> = peer.name.as_str().into();
    // Dropped with the connection: nobody waits for their answers any more.
    let mut running = JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        let received = match timeout(local.config.idle_timeout(), reader.next()).await {
            Ok(received) => received?,
            Err(_) if running.is_empty() => return Ok(()),
            Err(_) => continue,
        };
        let Some(received) = received else { return Ok(()) };
        if received.frame_type != FrameType::Control {
            return Err(Error::new(ErrorKind::Malformed, "a foreign frame on a control connection"));
        }
        match Control::decode(&received.body)? {
            Control::Ping => send(&answers, &Control::Pong, local).await?,
            Control::Request { id, patience, topic, body } => {
                let room = u32::try_from(body.len().max(1)).unwrap_or(u32::MAX);
                let room = Arc::clone(&local.queue_bytes).try_acquire_many_owned(room);
                let full = running.len() >= local.config.requests_per_peer;
                let (Ok(room), false) = (room, full) else {
                    let error = Error::new(ErrorKind::QueueFull, "the peer has too many requests waiting");
                    send(&answers, &refusal(id, &error), local).await?;
                    continue;
                };
                let (local, answers, name) = (Arc::clone(local), answers.clone(), Arc::clone(&name));
                running.spawn(async move {
                    let answer = match timeout(patience, handle(&local, name, topic, body)).await {
                        Ok(Ok(body)) => Control::Reply { id, result: Ok(body) },
                        Ok(Err(error)) => refusal(id, &error),
                        // The peer has given up; its identity is still answered, in case it has not quite.
                        Err(_) => refusal(id, &Error::new(ErrorKind::DeadlineExceeded, "no answer in time")),
                    };
                    drop(room);
                    // Only fails when the connection has ended.
                    let _ = send(&answers, &answer, &local).await;
                });
            }
            Control::Pong => {}
            Control::Greeting(_) | Control::Reply { .. } => {
                return Err(Error::new(
                    ErrorKind::Malformed,
                    "a client sent what only servers send, or greeted twice",
                ));
            }
        }
    }
}

async fn handle(local: &Local, peer: Arc<str>, topic: String, body: Vec<u8>) -> Result<Vec<u8>> {
    let handler = local.handler(&topic).ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, format!("the peer answers no requests about {}", shown(&topic)))
    })?;
    local.handle(move || handler(&peer, &body)).await
}

fn refusal(id: u64, error: &Error) -> Control {
    Control::Reply { id, result: Err(Refusal::of(error)) }
}

fn frame(message: &Control, local: &Local) -> Result<Vec<u8>> {
    encode(FrameType::Control, &message.encode()?, local.config.frame_bytes)
}

async fn send(answers: &mpsc::Sender<Vec<u8>>, message: &Control, local: &Local) -> Result<()> {
    let bytes = match (frame(message, local), message) {
        (Err(error), Control::Reply { id, .. }) => frame(&refusal(*id, &error), local)?,
        (bytes, _) => bytes?,
    };
    answers.send(bytes).await.map_err(|_| Error::new(ErrorKind::PeerGone, "the connection has ended"))
}
