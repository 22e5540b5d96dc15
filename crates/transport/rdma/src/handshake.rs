//! What two ends tell each other to connect queue pairs.
//!
//! The fields are those of Mooncake's handshake; between Posthorse peers one more, `posthorse`, says what that lacks. A
//! connection that is made anew under the number of an older one ends that first: its answer is the fence.

use posthorse_core::{Error, ErrorKind, Hello, Incarnation, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::gid::Gid;

/// The topic under which queue pairs are connected.
pub(crate) const CONNECT: &str = "rdma.connect";
/// The topic under which connections are ended.
pub(crate) const CLOSE: &str = "rdma.close";
/// The topic under which notifications go.
pub(crate) const NOTIFY: &str = "rdma.notify";

/// No message is longer.
const MAX_BYTES: usize = 16 << 10;
/// No side has more queue pairs to a pair of devices.
pub(crate) const MAX_QUEUE_PAIRS: usize = 16;

/// One end's queue pairs, and whose they are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HandshakeDesc {
    /// The sender: its segment name, `@`, its device.
    pub(crate) local_nic_path: String,
    /// The receiver, in the same form.
    pub(crate) peer_nic_path: String,
    #[serde(default)]
    pub(crate) local_lid: u16,
    pub(crate) local_gid: String,
    pub(crate) qp_num: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) posthorse: Option<Extension>,
}

/// What Posthorse peers add.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Extension {
    pub(crate) hello: Hello,
    /// The sender's life.
    pub(crate) incarnation: Incarnation,
    /// The receiver's life, as far as the sender knows.
    #[serde(default)]
    pub(crate) to: Option<Incarnation>,
    /// The number of the connection, the initiator's own.
    pub(crate) connection: u64,
    /// The longest packet of the sender's port.
    pub(crate) mtu: u32,
    /// Where the sender can be read to flush what was written there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) word: Option<Word>,
}

/// A word of memory that may be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Word {
    pub(crate) address: u64,
    pub(crate) key: u32,
}

/// Ends connections of the sender's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Close {
    pub(crate) incarnation: Incarnation,
    pub(crate) connections: Vec<u64>,
}

impl HandshakeDesc {
    /// # Errors
    /// `Malformed` for what is no GID, or too many queue pairs or none.
    pub(crate) fn check(&self) -> Result<Gid> {
        let count = self.qp_num.len();
        if !(1..=MAX_QUEUE_PAIRS).contains(&count) {
            let text = format!("a handshake of {count} queue pairs; accepted: 1 to {MAX_QUEUE_PAIRS}");
            return Err(Error::new(ErrorKind::Malformed, text));
        }
        self.local_gid.parse()
    }
}

/// Writes a message.
pub(crate) fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(message)
        .map_err(|error| Error::new(ErrorKind::Internal, format!("writing a handshake: {error}")))
}

/// Reads a message.
///
/// # Errors
/// `Malformed`.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let malformed =
        |why: String| Error::new(ErrorKind::Malformed, format!("a handshake of transport rdma: {why}"));
    if bytes.len() > MAX_BYTES {
        return Err(malformed(format!("{} bytes; accepted: up to {MAX_BYTES}", bytes.len())));
    }
    serde_json::from_slice(bytes).map_err(|error| malformed(error.to_string()))
}

/// A device of an engine, as handshakes name it.
pub(crate) fn nic_path(name: &str, device: &str) -> String {
    format!("{name}@{device}")
}

/// The engine and the device that a handshake names.
///
/// # Errors
/// `Malformed` without `@`.
pub(crate) fn of_nic_path(path: &str) -> Result<(&str, &str)> {
    path.rsplit_once('@').ok_or_else(|| {
        let shown: String = path.chars().take(64).filter(|c| !c.is_control()).collect();
        Error::new(ErrorKind::Malformed, format!("a handshake names {shown:?}; accepted: NAME@DEVICE"))
    })
}

#[cfg(test)]
mod tests {
    use posthorse_core::Features;
    use proptest::prelude::*;

    use super::*;

    fn desc() -> HandshakeDesc {
        HandshakeDesc {
            local_nic_path: nic_path("10.0.0.1:15000", "mlx5_0"),
            peer_nic_path: nic_path("[fd00::1]:15001", "mlx5_1"),
            local_lid: 0,
            local_gid: Gid([7; 16]).to_string(),
            qp_num: vec![17, 18],
            posthorse: Some(Extension {
                hello: Hello::new(Features::NONE, None),
                incarnation: Incarnation(1),
                to: Some(Incarnation(2)),
                connection: 3,
                mtu: 4096,
                word: Some(Word { address: u64::MAX, key: 5 }),
            }),
        }
    }

    #[test]
    fn a_handshake_survives_the_wire_and_names_both_ends() {
        let desc = desc();
        assert_eq!(decode::<HandshakeDesc>(&encode(&desc).unwrap()).unwrap(), desc);
        assert_eq!(desc.check().unwrap(), Gid([7; 16]));
        assert_eq!(of_nic_path(&desc.peer_nic_path).unwrap(), ("[fd00::1]:15001", "mlx5_1"));
        assert_eq!(of_nic_path("nobody").unwrap_err().kind(), ErrorKind::Malformed);
    }

    #[test]
    fn a_foreign_handshake_is_understood() {
        let text = br#"{"local_gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:02","local_lid":0,"local_nic_path":"127.0.0.1:16375@rxe1","payload":"","peer_nic_path":"127.0.0.1:15616@rxe0","qp_num":[17,18],"ready_ack":false,"reply_msg":""}
"#;
        let desc: HandshakeDesc = decode(text).unwrap();
        assert_eq!((desc.qp_num.as_slice(), &desc.posthorse), ([17, 18].as_slice(), &None));
        desc.check().unwrap();
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for change in [
            (|desc| desc.qp_num.clear()) as fn(&mut HandshakeDesc),
            |desc| desc.qp_num = vec![1; MAX_QUEUE_PAIRS + 1],
            |desc| desc.local_gid = "zz".to_owned(),
        ] {
            let mut desc = desc();
            change(&mut desc);
            assert_eq!(desc.check().unwrap_err().kind(), ErrorKind::Malformed);
        }
        assert!(decode::<Close>(&vec![b' '; MAX_BYTES + 1]).unwrap_err().to_string().contains("16385"));
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_decoder_panic(bytes: Vec<u8>, at in 0..400_usize, byte: u8) {
            let _ = decode::<HandshakeDesc>(&bytes);
            let mut damaged = encode(&desc()).unwrap();
            let at = at % damaged.len();
            damaged[at] = byte;
            if let Ok(desc) = decode::<HandshakeDesc>(&damaged) {
                let _ = (desc.check(), of_nic_path(&desc.peer_nic_path).map(drop));
            }
        }
    }
}
