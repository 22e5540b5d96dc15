//! The threads of the devices, and what is looked at now and then.

use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use posthorse_core::{Error, Result};

use crate::rail::Rail;
use crate::shared::Shared;
use crate::verbs::Wakeup;

/// How often one that meets with errors goes on before it gives its device up.
const MOST_ERRORS: u32 = 16;

/// Starts the thread of a device.
pub(crate) fn start(shared: &Arc<Shared>, rail: &Arc<Rail>) -> Result<JoinHandle<()>> {
    let (there, rail) = (Arc::downgrade(shared), Arc::clone(rail));
    let spin = shared.config.spin();
    std::thread::Builder::new()
        .name(format!("rdma-{}", rail.name()))
        .spawn(move || run(&there, &rail, spin))
        .map_err(|error| Error::os("starting a thread of transport rdma", &error))
}

fn run(there: &Weak<Shared>, rail: &Arc<Rail>, spin: Duration) {
    let mut errors = 0;
    loop {
        let woken = rail.device.wait(None);
        let Some(shared) = there.upgrade().filter(|shared| !shared.is_stopped()) else { return };
        match woken {
            Ok(Wakeup::Completions(key)) => {
                if let Some(connection) = shared.connection(key) {
                    connection.progress(&shared, true);
                }
                if !spin.is_zero() {
                    keep_looking(&shared, rail, spin);
                }
            }
            Ok(Wakeup::PortChanged(port)) if port == shared.config.port => port_changed(&shared, rail),
            Ok(Wakeup::DeviceFailed) => {
                let error = Error::new(posthorse_core::ErrorKind::PathFailed, "the device is beyond use");
                fail_all(&shared, rail, &error.with_device(rail.name()));
            }
            Ok(Wakeup::PortChanged(_) | Wakeup::Woken | Wakeup::TimedOut) => {}
            Err(error) => {
                errors += 1;
                tracing::error!(device = rail.name(), %error, "waiting for a device");
                if errors == MOST_ERRORS {
                    fail_all(&shared, rail, &error);
                    return;
                }
            }
        }
    }
}

/// Looks for completions without sleeping, until there were none for a while.
fn keep_looking(shared: &Arc<Shared>, rail: &Arc<Rail>, spin: Duration) {
    let mut last = Instant::now();
    while !shared.is_stopped() {
        let mut any = false;
        for connection in shared.all_connections() {
            if connection.is_busy() && Arc::ptr_eq(&connection.rail, rail) {
                any |= connection.progress(shared, false);
            }
        }
        let now = Instant::now();
        if any {
            last = now;
        } else if now - last >= spin {
            break;
        }
        std::hint::spin_loop();
    }
    for connection in shared.all_connections() {
        if Arc::ptr_eq(&connection.rail, rail) {
            connection.progress(shared, true);
        }
    }
}

fn port_changed(shared: &Arc<Shared>, rail: &Arc<Rail>) {
    match rail.down(&shared.config) {
        Some(error) => fail_all(shared, rail, &error),
        None => {
            for connection in shared.all_connections() {
                if Arc::ptr_eq(&connection.rail, rail) && connection.down().is_some() {
                    let there = Arc::downgrade(shared);
                    shared.workers.run(move || {
                        if let Some(shared) = there.upgrade() {
                            connection.try_again(&shared);
                        }
                    });
                }
            }
        }
    }
}

fn fail_all(shared: &Arc<Shared>, rail: &Arc<Rail>, error: &Error) {
    for connection in shared.all_connections() {
        if Arc::ptr_eq(&connection.rail, rail) {
            connection.port_failed(shared, error.clone());
        }
    }
}

/// Asks now and then, three times within the time that a peer may be silent, whether those who say nothing are there.
pub(crate) fn look_again(shared: &Arc<Shared>) {
    let there = Arc::downgrade(shared);
    shared.workers.run_at(Instant::now() + shared.config.liveness() / 3, move || {
        let Some(shared) = there.upgrade().filter(|shared| !shared.is_stopped()) else { return };
        for connection in shared.all_connections() {
            connection.look(&shared);
        }
        shared.served.look();
        look_again(&shared);
    });
}
