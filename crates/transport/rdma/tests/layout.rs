//! The structures of rdma-sys, of which those with unions were written by hand, lie in memory as the C compiler has
//! them.
#![cfg(feature = "rdma")]
#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::mem::offset_of;
use std::process::Command;

/// For each structure and each field: how to name it in C, and the number that Rust has for it.
macro_rules! layout {
    ($($name:ident { $($field:ident $(= $c:literal)?),* $(,)? })*) => {
        vec![$(
            (concat!("sizeof(struct ", stringify!($name), ")").to_owned(), size_of::<rdma_sys::$name>()),
            $((
                format!("offsetof(struct {}, {})", stringify!($name), layout!(@c $field $($c)?)),
                offset_of!(rdma_sys::$name, $field),
            ),)*
        )*]
    };
    (@c $field:ident) => { stringify!($field) };
    (@c $field:ident $c:literal) => { $c };
}

#[test]
fn structures_are_as_the_c_compiler_has_them() {
    let mut expected = layout! {
        ibv_sge { addr, length, lkey }
        ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data_invalidated_rkey_union = "imm_data", wr, qp_type,
            bind_mw_tso_union = "bind_mw",
        }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data_invalidated_rkey_union = "imm_data", qp_num, src_qp,
            wc_flags, pkey_index, slid, sl, dlid_path_bits,
        }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_qp_attr {
            qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index,
            max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, rate_limit,
        }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_port_attr {
            state, active_mtu, gid_tbl_len, max_msg_sz, lid, active_width, active_speed, link_layer, port_cap_flags2,
        }
        ibv_device_attr {
            max_mr_size, max_qp, max_qp_wr, max_cqe, max_mr, max_qp_rd_atom, max_qp_init_rd_atom, phys_port_cnt,
        }
        ibv_async_event { element, event_type }
        ibv_device { name, dev_name, dev_path, ibdev_path }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
        ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        ibv_comp_channel { context, fd, refcnt }
        ibv_pd { context, handle }
        ibv_cq { context, channel, cq_context, handle, cqe, comp_events_completed }
        ibv_qp { context, qp_context, pd, send_cq, recv_cq, handle, qp_num, state, qp_type, events_completed }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
    };
    expected.push(("sizeof(union ibv_gid)".to_owned(), size_of::<rdma_sys::ibv_gid>()));
    expected.push((
        "offsetof(struct ibv_send_wr, wr.rdma.rkey)".to_owned(),
        offset_of!(rdma_sys::ibv_send_wr, wr) + offset_of!(rdma_sys::rdma_t, rkey),
    ));
    // What this crate says itself, because rdma-sys does not.
    expected.push(("IBV_LINK_LAYER_ETHERNET".to_owned(), 2));
    expected.push(("IBV_FORK_UNNEEDED".to_owned(), 2));
    expected.push(("IBV_ACCESS_RELAXED_ORDERING".to_owned(), 1 << 20));

    let in_c = evaluated_by_c(expected.iter().map(|(expression, _)| expression.as_str()));
    assert_eq!(in_c.len(), expected.len());
    for ((expression, in_rust), in_c) in expected.iter().zip(in_c) {
        assert_eq!(*in_rust, in_c, "{expression}");
    }
}

/// What expressions are after `#include <infiniband/verbs.h>`.
fn evaluated_by_c<'a>(expressions: impl Iterator<Item = &'a str>) -> Vec<usize> {
    let mut source = String::from(
        "#include <infiniband/verbs.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n",
    );
    for expression in expressions {
        writeln!(source, "    printf(\"%zu\\n\", (size_t)({expression}));").unwrap();
    }
    source.push_str("    return 0;\n}\n");
    let folder = tempfile::tempdir().unwrap();
    let (file, program) = (folder.path().join("layout.c"), folder.path().join("layout"));
    std::fs::write(&file, source).unwrap();
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let compiled = Command::new(compiler).arg("-o").arg(&program).arg(&file).output().unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(program).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}
