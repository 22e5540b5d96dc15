//! A child that was forked has a descriptor of its own for each socket of its parent.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};

use posthorse_core::*;
use posthorse_tcp::TcpConfig;
use posthorse_testkit::IdleChild;

use crate::hostile::{opening, welcome};
use crate::support::*;

/// Waits until the other side has ended the connection.
fn wait_for_end(mut socket: TcpStream) {
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    match socket.read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
}

#[test]
fn what_ends_has_ended_for_its_peers_although_a_forked_child_lives_on() {
    let config = TcpConfig { bulk_lanes: 1, ..local() };
    let here = Node::with("here:1", config, Hello::new(Features::NONE, None));
    let owner = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = owner.local_addr().unwrap().port();
    let mut desc = here.desc.clone();
    (desc.name, desc.incarnation) = ("there:1".to_owned(), None);
    desc.transports.insert("tcp".into(), serde_json::json!({"host": "127.0.0.1", "port": port}));
    let welcoming = std::thread::spawn(move || {
        [(); 2].map(|()| {
            let mut lane = owner.accept().unwrap().0;
            welcome(&mut lane, &[]);
            lane
        })
    });
    let path = here.connect(&desc);
    let lanes = welcoming.join().unwrap();
    let mut greeting = TcpStream::connect(("127.0.0.1", here.port())).unwrap();
    greeting.write_all(b"PST").unwrap();
    let mut initiator = TcpStream::connect(("127.0.0.1", here.port())).unwrap();
    initiator.write_all(&opening(0)).unwrap();
    assert!(initiator.read(&mut [0; 1]).unwrap() == 1);

    let _child = IdleChild::fork();
    here.transport.disconnect(path);
    lanes.into_iter().for_each(wait_for_end);
    let greeting_too = std::thread::spawn(|| wait_for_end(greeting));
    here.transport.stop();
    wait_for_end(initiator);
    greeting_too.join().unwrap();
    let again = TcpStream::connect(("127.0.0.1", here.port())).unwrap_err();
    assert_eq!(again.kind(), ErrorKind::ConnectionRefused, "{again}");
}
