//! Archives in cpio's format "newc", which the kernel unpacks at boot (Documentation/driver-api/early-userspace/
//! buffer-format.rst of Linux).

/// The name that ends an archive.
const END: &str = "TRAILER!!!";

/// What an entry is, as in `st_mode`.
const FOLDER: u32 = 0o040_755;
const FILE: u32 = 0o100_644;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An archive that is being written. A folder goes in before what lies in it.
#[derive(Debug, Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    pub(super) fn folder(&mut self, name: &str) {
        self.entry(name, FOLDER, (0, 0), &[]);
    }

    pub(super) fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, FILE, (0, 0), content);
    }

    pub(super) fn program(&mut self, name: &str, content: &[u8]) {
        self.entry(name, PROGRAM, (0, 0), content);
    }

    /// A character device with its two numbers.
    pub(super) fn device(&mut self, name: &str, numbers: (u32, u32)) {
        self.entry(name, CHARACTER_DEVICE, numbers, &[]);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry(END, 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.entries += 1;
        let links = if mode == FOLDER { 2 } else { 1 };
        // Files are far below the format's 4 GiB.
        let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
        let owner_and_time = [0, 0, links, 0];
        self.bytes.extend_from_slice(b"070701");
        let fields = [self.entries, mode].into_iter().chain(owner_and_time);
        for field in fields.chain([size, 0, 0, major, minor, name_size, 0]) {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_as_the_kernel_wants_it() {
        let mut archive = Archive::default();
        archive.folder("d");
        archive.file("d/abc", b"hello");
        archive.device("null", (1, 3));
        let expected = [
            "070701",
            "00000001",
            "000041ed",
            "00000000",
            "00000000",
            "00000002",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000002",
            "00000000",
            "d\0",
            // The header and the name have 112 bytes.
            "070701",
            "00000002",
            "000081a4",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000005",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000006",
            "00000000",
            "d/abc\0",
            "hello\0\0\0",
            "070701",
            "00000003",
            "00002180",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000001",
            "00000003",
            "00000005",
            "00000000",
            "null\0\0",
            "070701",
            "00000004",
            "00000000",
            "00000000",
            "00000000",
            "00000001",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "0000000b",
            "00000000",
            "TRAILER!!!\0\0\0\0",
        ];
        assert_eq!(String::from_utf8(archive.finish()).unwrap(), expected.concat());
    }

    #[test]
    fn a_program_can_be_run() {
        let mut archive = Archive::default();
        archive.program("init", b"");
        assert_eq!(&archive.finish()[14..22], b"000081ed");
    }
}
