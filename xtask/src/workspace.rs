//! What cargo knows of the workspace.

use std::path::Path;

use cargo_metadata::{Metadata, MetadataCommand};

use crate::failure::Failure;

/// Reads the workspace around `manifest`, or around the current folder.
///
/// Dependencies from outside are not resolved, so this needs neither a network nor a lock file.
pub(crate) fn load(manifest: Option<&Path>) -> Result<Metadata, Failure> {
    let mut command = MetadataCommand::new();
    command.no_deps();
    if let Some(manifest) = manifest {
        command.manifest_path(manifest);
    }
    command.exec().map_err(|error| match error {
        cargo_metadata::Error::Io(error) => Failure::Unavailable(format!("cargo cannot be started: {error}")),
        error => Failure::Check(format!("cargo metadata: {error}")),
    })
}
