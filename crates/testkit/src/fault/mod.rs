//! Any transport, with faults put in by plan.

mod ledger;
mod plan;
mod transport;

pub use plan::{Disturbance, Failure, Fault, FaultRates, Plan};
pub use transport::FaultTransport;
