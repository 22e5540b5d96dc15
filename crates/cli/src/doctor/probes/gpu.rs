//! GPUs, by the files of their driver: no CUDA library is loaded.

use super::{Probe, rdma};
use crate::doctor::host::Host;
use crate::doctor::report::{Check, State};

const AREA: &str = "GPU";

pub(super) const PROBES: &[Probe] = &[gpus, mig, mps, gpu_rdma];

const DRIVER: &str = "proc/driver/nvidia";

/// The models of the GPUs that the driver has.
fn models(host: &Host) -> Vec<String> {
    let names = host.names(format!("{DRIVER}/gpus"));
    let model = |name: &String| host.field(&format!("{DRIVER}/gpus/{name}/information"), "Model");
    names.iter().map(|name| model(name).unwrap_or_else(|| name.clone())).collect()
}

fn gpus(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "gpus", state, found);
    let models = models(host);
    let is_gpu = |name: &String| {
        let number = name.strip_prefix("nvidia");
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let nodes = host.names("dev").iter().filter(|name| is_gpu(name)).count();
    match (models.len(), nodes) {
        (0, 0) => {
            check(State::Absent, "no NVIDIA driver".to_owned()).costs("tensors are in host memory alone")
        }
        (0, _) => check(State::Unknown, format!("{nodes} in /dev, none in /proc/driver/nvidia")),
        (_, 0) => check(State::Limited, models.join(", "))
            .costs("the driver has GPUs that this process cannot open")
            .mend("for a container: --gpus all; else: nvidia-modprobe -c 0 -u"),
        _ => check(State::Ok, models.join(", ")),
    }
}

fn mig(host: &Host) -> Check {
    let check = |state, found: String| Check::new(AREA, "mig", state, found);
    if models(host).is_empty() {
        return check(State::Absent, "no GPU".to_owned());
    }
    let folder = format!("{DRIVER}/capabilities");
    let gpus = host.names(&folder).into_iter().filter(|name| name.starts_with("gpu"));
    let instances: usize = gpus
        .map(|gpu| {
            host.names(format!("{folder}/{gpu}/mig")).iter().filter(|name| name.starts_with("gi")).count()
        })
        .sum();
    match instances {
        0 => check(State::Ok, "no GPU is divided".to_owned()),
        count => check(State::Limited, format!("{count} instances"))
            .costs("instances share no memory with each other by CUDA IPC"),
    }
}

fn mps(host: &Host) -> Check {
    const FOLDER: &str = "/tmp/nvidia-mps";
    let folder = host.variable("CUDA_MPS_PIPE_DIRECTORY").unwrap_or(FOLDER);
    match host.has(format!("{folder}/control")) {
        true => Check::new(AREA, "mps", State::Ok, format!("served at {folder}")),
        false => Check::new(AREA, "mps", State::Absent, "no server").costs("processes on one GPU take turns"),
    }
}

fn gpu_rdma(host: &Host) -> Check {
    let check = |state, found: &str| Check::new(AREA, "gpu_rdma", state, found);
    if models(host).is_empty() || rdma::found(host).is_empty() {
        return check(State::Absent, "needs a GPU and an RDMA device");
    }
    let costs = "memory of GPUs goes through host memory";
    let mend = "modprobe nvidia_peermem";
    match host.kernel() {
        _ if host.has("sys/module/nvidia_peermem") => check(State::Ok, "nvidia_peermem"),
        // The kernel of 5.12 brought dma-buf to verbs. Whether driver and device know it, only trying shows.
        Some(kernel) if kernel >= (5, 12) => {
            check(State::Unknown, "no nvidia_peermem; by dma-buf, where driver and device know it")
                .costs(costs)
                .mend(mend)
        }
        Some(_) => check(State::Limited, "no nvidia_peermem, and the kernel is older than 5.12")
            .costs(costs)
            .mend(mend),
        None => check(State::Unknown, "no nvidia_peermem; the kernel does not say its version")
            .costs(costs)
            .mend(mend),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::host::tests::fake;

    const GPU: (&str, &str) =
        ("proc/driver/nvidia/gpus/0000:18:00.0/information", "Model: \t\t NVIDIA H200\n");
    const NODE: (&str, &str) = ("dev/nvidia0", "");

    fn state(probe: Probe, files: &[(&str, &str)]) -> State {
        probe(&fake(files).host).state
    }

    #[test]
    fn gpus_are_those_of_the_driver_that_can_be_opened() {
        assert_eq!(state(gpus, &[("dev/nvidiactl", "")]), State::Absent);
        assert_eq!(state(gpus, &[NODE]), State::Unknown);
        assert_eq!(state(gpus, &[GPU]), State::Limited);
        assert_eq!(gpus(&fake(&[GPU, NODE]).host).found, "NVIDIA H200");
        assert_eq!(state(gpus, &[GPU, NODE]), State::Ok);
    }

    #[test]
    fn division_and_sharing() {
        assert_eq!((state(mig, &[]), state(mig, &[GPU])), (State::Absent, State::Ok));
        let instance = ("proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "");
        assert_eq!(state(mig, &[GPU, instance]), State::Limited);
        assert_eq!(state(mps, &[]), State::Absent);
        assert_eq!(state(mps, &[("tmp/nvidia-mps/control", "")]), State::Ok);
        let elsewhere = fake(&[("run/mps/control", "")]).with("CUDA_MPS_PIPE_DIRECTORY", "/run/mps");
        assert_eq!(mps(&elsewhere.host).state, State::Ok);
    }

    #[test]
    fn memory_of_gpus_by_rdma() {
        let device = ("sys/class/infiniband/mlx5_0/fw_ver", "1");
        let kernel = |text| ("proc/sys/kernel/osrelease", text);
        assert_eq!(state(gpu_rdma, &[GPU]), State::Absent);
        assert_eq!(state(gpu_rdma, &[GPU, device, ("sys/module/nvidia_peermem/version", "1")]), State::Ok);
        assert_eq!(state(gpu_rdma, &[GPU, device, kernel("5.11.0")]), State::Limited);
        assert_eq!(state(gpu_rdma, &[GPU, device, kernel("5.12.0")]), State::Unknown);
    }
}
