//! Sockets that end when we are done with them, even if a child that was forked holds them too.
//!
//! Such a child has a descriptor of its own for each socket that is open when it is forked. As long as it lives, closing
//! ours does neither: the system goes on watching the socket for us, with nobody left who could tell it to stop, and the
//! peer waits for an end that does not come.

use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::Arc;

use posthorse_core::Result;
use rustix::event::epoll::EventFlags;

use crate::reactor::Handle;

/// A socket that can be told to end.
pub(crate) trait End: AsFd {
    /// Ends it for everyone who holds it.
    fn end(&self);
}

impl End for TcpStream {
    fn end(&self) {
        // Refused when it has ended already.
        let _ = self.shutdown(Shutdown::Both);
    }
}

impl End for TcpListener {
    fn end(&self) {
        let _ = socket2::SockRef::from(self).shutdown(Shutdown::Both);
    }
}

/// A socket that a reactor may be watching. Dropped, it is no longer watched, and has ended for everyone.
#[derive(Debug)]
pub(crate) struct Watched<S: End> {
    socket: S,
    watch: Option<Watch>,
}

#[derive(Debug)]
struct Watch {
    reactor: Arc<Handle>,
    key: u64,
}

impl<S: End> Watched<S> {
    /// One that nobody watches yet.
    pub(crate) const fn new(socket: S) -> Self {
        Self { socket, watch: None }
    }

    /// Has a reactor watch it, in place of whoever did.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`.
    pub(crate) fn watch(&mut self, reactor: &Arc<Handle>, key: u64, interest: EventFlags) -> Result<()> {
        self.unwatch();
        reactor.watch(self.socket.as_fd(), key, interest)?;
        self.watch = Some(Watch { reactor: Arc::clone(reactor), key });
        Ok(())
    }

    /// Has whoever watches it watch for something else.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`.
    pub(crate) fn rewatch(&self, interest: EventFlags) -> Result<()> {
        match &self.watch {
            Some(Watch { reactor, key }) => reactor.rewatch(self.socket.as_fd(), *key, interest),
            None => Ok(()),
        }
    }

    pub(crate) fn unwatch(&mut self) {
        if let Some(Watch { reactor, .. }) = self.watch.take() {
            reactor.unwatch(self.socket.as_fd());
        }
    }
}

impl<S: End> Deref for Watched<S> {
    type Target = S;

    fn deref(&self) -> &S {
        &self.socket
    }
}

impl<S: End> Drop for Watched<S> {
    fn drop(&mut self) {
        self.unwatch();
        self.socket.end();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_connection_ends_although_somebody_else_holds_it_too() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let reactor = Arc::new(Handle::new().unwrap());
        let mut ours = Watched::new(listener.accept().unwrap().0);
        ours.watch(&reactor, 7, EventFlags::IN).unwrap();
        // As a forked child does.
        let copy = ours.try_clone().unwrap();
        peer.write_all(b"x").unwrap();
        assert_eq!(reactor.wait(Duration::from_secs(10)), [7]);
        drop(ours);
        assert_eq!(reactor.wait(Duration::ZERO), [0_u64; 0]);
        peer.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        assert_eq!(peer.read(&mut [0]).unwrap(), 0);
        drop(copy);
    }

    #[test]
    fn a_port_is_free_although_somebody_else_holds_its_listener_too() {
        let mut listener = Watched::new(TcpListener::bind("127.0.0.1:0").unwrap());
        let at = listener.local_addr().unwrap();
        let reactor = Arc::new(Handle::new().unwrap());
        listener.watch(&reactor, 7, EventFlags::IN).unwrap();
        let copy = listener.try_clone().unwrap();
        drop(listener);
        assert_eq!(TcpStream::connect(at).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        assert_eq!(reactor.wait(Duration::ZERO), [0_u64; 0]);
        TcpListener::bind(at).unwrap();
        drop(copy);
    }
}
