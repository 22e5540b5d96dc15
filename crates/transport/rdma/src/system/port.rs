//! How a port is, and its addresses.

use std::mem::MaybeUninit;

use posthorse_core::{Error, ErrorKind, Result};
use rdma_sys::{ibv_gid, ibv_mtu, ibv_port_attr, ibv_port_state};

use super::handles::{Context, outcome};
use crate::gid::Gid;
use crate::sysfs::gid_attributes;
use crate::verbs::{GidEntry, Port, PortState};

/// `IBV_LINK_LAYER_ETHERNET` of verbs.h, which rdma-sys does not have.
const ETHERNET: u8 = 2;

/// Asks the device for the attributes of a port, of which it has `ports`.
///
/// # Errors
/// `NotFound`; `Io`.
pub(super) fn query(context: &Context, ports: u8, port: u8) -> Result<ibv_port_attr> {
    context.check_fork()?;
    if port == 0 || port > ports {
        let text = format!("the device has no port {port}; accepted: 1 to {ports}");
        return Err(Error::new(ErrorKind::NotFound, text).with_device(&*context.name));
    }
    let mut attributes = MaybeUninit::<ibv_port_attr>::zeroed();
    // SAFETY: the device is open, and the attributes outlive the call.
    let asked =
        outcome(unsafe { (context.library.query_port)(context.as_ptr(), port, attributes.as_mut_ptr()) });
    asked.map_err(|error| context.refused(&format!("asking for port {port}"), &error))?;
    // SAFETY: numbers alone, cleared before they were filled.
    Ok(unsafe { attributes.assume_init() })
}

/// What of the attributes matters here.
pub(super) fn port(attributes: &ibv_port_attr) -> Port {
    let ethernet = attributes.link_layer == ETHERNET;
    let active = [ibv_port_state::IBV_PORT_ACTIVE, ibv_port_state::IBV_PORT_ACTIVE_DEFER];
    Port {
        state: if active.contains(&attributes.state) { PortState::Active } else { PortState::Down },
        mtu: mtu_bytes(attributes.active_mtu),
        lid: attributes.lid,
        ethernet,
        bandwidth: bandwidth(attributes.active_width, attributes.active_speed, ethernet),
        message_bytes: attributes.max_msg_sz,
    }
}

/// The bytes that a number of `ibv_mtu` stands for; those of the least where it is not known.
fn mtu_bytes(number: ibv_mtu::Type) -> u32 {
    match number {
        ibv_mtu::IBV_MTU_512 => 512,
        ibv_mtu::IBV_MTU_1024 => 1024,
        ibv_mtu::IBV_MTU_2048 => 2048,
        ibv_mtu::IBV_MTU_4096 => 4096,
        _ => 256,
    }
}

/// The number of `ibv_mtu` for so many bytes.
pub(super) fn mtu_number(bytes: u32) -> Option<ibv_mtu::Type> {
    (ibv_mtu::IBV_MTU_256..=ibv_mtu::IBV_MTU_4096).find(|number| mtu_bytes(*number) == bytes)
}

/// Bytes per second, from how many lanes there are and how fast each is (IBTA specification, PortInfo); zero when
/// unknown.
fn bandwidth(width: u8, speed: u8, ethernet: bool) -> u64 {
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 0,
    };
    // Millions of bits per second that carry data. The first three speeds of InfiniBand spend two bits of ten on the
    // line code; drivers of Ethernet name by them what carries it whole.
    let lane = match (speed, ethernet) {
        (1, false) => 2_000,
        (1, true) => 2_500,
        (2, false) => 4_000,
        (2, true) => 5_000,
        (4, false) => 8_000,
        (4, true) | (8, _) => 10_000,
        (16, _) => 13_636,
        (32, _) => 25_000,
        (64, _) => 50_000,
        (128, _) => 100_000,
        _ => 0,
    };
    lanes * lane * 1_000_000 / 8
}

/// The addresses of a port whose table has so many places.
pub(super) fn gids(context: &Context, port: u8, places: i32) -> Vec<GidEntry> {
    let folder = context.folder().join(format!("ports/{port}"));
    let last = u8::try_from((places - 1).min(i32::from(u8::MAX))).ok();
    let places = last.map(|last| 0..=last).into_iter().flatten();
    places
        .filter_map(|index| {
            let gid = gid(context, port, index)?;
            let (kind, interface) = gid_attributes(&folder, index);
            Some(GidEntry { index, gid, kind, interface })
        })
        .collect()
}

/// The address at a place, unless that is empty. Some drivers refuse to read an empty place, others give zeros.
fn gid(context: &Context, port: u8, index: u8) -> Option<Gid> {
    let mut gid = ibv_gid { raw: [0; 16] };
    // SAFETY: the device is open, and the address outlives the call.
    let asked = unsafe { (context.library.query_gid)(context.as_ptr(), port, index.into(), &raw mut gid) };
    // SAFETY: sixteen bytes, however they are looked at.
    let gid = Gid(unsafe { gid.raw });
    (outcome(asked).is_ok() && !gid.is_empty()).then_some(gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mtu_is_the_same_in_bytes_and_as_a_number() {
        for bytes in [256, 512, 1024, 2048, 4096] {
            assert_eq!(mtu_number(bytes).map(mtu_bytes), Some(bytes));
        }
        assert_eq!((mtu_number(1500), mtu_number(0), mtu_number(8192)), (None, None, None));
    }

    #[test]
    fn bandwidth_is_that_of_the_data() {
        let gigabits = |width, speed, ethernet| bandwidth(width, speed, ethernet) * 8 / 1_000_000_000;
        assert_eq!(gigabits(2, 32, false), 100);
        assert_eq!(gigabits(2, 128, false), 400);
        assert_eq!(gigabits(2, 4, false), 32);
        assert_eq!(gigabits(2, 4, true), 40);
        assert_eq!((gigabits(3, 32, true), gigabits(2, 0, true)), (0, 0));
    }
}
