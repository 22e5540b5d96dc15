//! The few pieces of msgpack that a layout in place needs: headers written at a chosen length, and a reader
//! that takes no memory and checks every bound. <https://github.com/msgpack/msgpack/blob/master/spec.md>

use posthorse_core::{Error, ErrorKind, Result};

/// The encodings of a string's length, from the shortest: how many bytes the header takes.
pub(super) const STR_HEADERS: [usize; 4] = [1, 2, 3, 5];

/// Appends a string whose length takes `header` bytes, one of [`STR_HEADERS`]; a longer one is taken where
/// the string needs it.
pub(super) fn write_str(out: &mut Vec<u8>, text: &str, header: usize) {
    let len = text.len();
    match header.max(shortest_str_header(len)) {
        1 => out.push(0xa0 | len as u8),
        2 => out.extend_from_slice(&[0xd9, len as u8]),
        3 => {
            out.push(0xda);
            out.extend_from_slice(&(len as u16).to_be_bytes());
        }
        _ => {
            out.push(0xdb);
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }
    out.extend_from_slice(text.as_bytes());
}

/// The fewest bytes in which a string's length can be said.
const fn shortest_str_header(len: usize) -> usize {
    match len {
        0..32 => 1,
        32..256 => 2,
        256..65536 => 3,
        _ => 5,
    }
}

/// Appends the header of a map in its shortest form.
pub(super) fn write_map(out: &mut Vec<u8>, len: usize) {
    match len {
        0..16 => out.push(0x80 | len as u8),
        16..65536 => {
            out.push(0xde);
            out.extend_from_slice(&(len as u16).to_be_bytes());
        }
        _ => {
            out.push(0xdf);
            out.extend_from_slice(&(len as u32).to_be_bytes());
        }
    }
}

/// Appends the header of an array in its shortest form; arrays here are shapes, shorter than 65536.
pub(super) fn write_array(out: &mut Vec<u8>, len: usize) {
    if len < 16 {
        out.push(0x90 | len as u8);
    } else {
        out.push(0xdc);
        out.extend_from_slice(&(len as u16).to_be_bytes());
    }
}

/// Appends an unsigned number in its shortest form.
pub(super) fn write_uint(out: &mut Vec<u8>, value: u64) {
    match value {
        0..128 => out.push(value as u8),
        128..256 => out.extend_from_slice(&[0xcc, value as u8]),
        256..65536 => {
            out.push(0xcd);
            out.extend_from_slice(&(value as u16).to_be_bytes());
        }
        65536..0x1_0000_0000 => {
            out.push(0xce);
            out.extend_from_slice(&(value as u32).to_be_bytes());
        }
        _ => {
            out.push(0xcf);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

/// Appends the header of a byte string in its longest form.
pub(super) fn write_bin32(out: &mut Vec<u8>, len: u32) {
    out.push(0xc6);
    out.extend_from_slice(&len.to_be_bytes());
}

/// Reads msgpack from a slice, in any of its encodings.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// How far it has read.
    pub(super) const fn position(&self) -> usize {
        self.at
    }

    pub(super) const fn is_at_end(&self) -> bool {
        self.at == self.bytes.len()
    }

    pub(super) fn map(&mut self) -> Result<usize> {
        match self.byte()? {
            byte @ 0x80..=0x8f => Ok(usize::from(byte & 0x0f)),
            0xde => self.number(2),
            0xdf => self.number(4),
            byte => Err(self.unexpected("a map", byte)),
        }
    }

    pub(super) fn array(&mut self) -> Result<usize> {
        match self.byte()? {
            byte @ 0x90..=0x9f => Ok(usize::from(byte & 0x0f)),
            0xdc => self.number(2),
            0xdd => self.number(4),
            byte => Err(self.unexpected("an array", byte)),
        }
    }

    /// Copied before it is looked at: the bytes may lie in memory that a peer can still write. No name is longer than
    /// 65,535 bytes.
    pub(super) fn str(&mut self) -> Result<String> {
        let len = match self.byte()? {
            byte @ 0xa0..=0xbf => usize::from(byte & 0x1f),
            0xd9 => self.number(1)?,
            0xda => self.number(2)?,
            0xdb => self.number(4)?,
            byte => return Err(self.unexpected("a string", byte)),
        };
        let at = self.at;
        let bytes = self.take(len)?;
        if len > u16::MAX.into() {
            return Err(malformed(format!("a string of {len} bytes at byte {at}; accepted: up to 65535")));
        }
        String::from_utf8(bytes.to_vec())
            .map_err(|_| malformed(format!("the string at byte {at} is not UTF-8")))
    }

    pub(super) fn bin(&mut self) -> Result<&'a [u8]> {
        let len = match self.byte()? {
            0xc4 => self.number(1)?,
            0xc5 => self.number(2)?,
            0xc6 => self.number(4)?,
            byte => return Err(self.unexpected("bytes", byte)),
        };
        self.take(len)
    }

    pub(super) fn bool(&mut self) -> Result<bool> {
        match self.byte()? {
            0xc2 => Ok(false),
            0xc3 => Ok(true),
            byte => Err(self.unexpected("true or false", byte)),
        }
    }

    pub(super) fn uint(&mut self) -> Result<u64> {
        let width = match self.byte()? {
            byte @ 0..=0x7f => return Ok(byte.into()),
            0xcc => 1,
            0xcd => 2,
            0xce => 4,
            0xcf => 8,
            byte => return Err(self.unexpected("an unsigned number", byte)),
        };
        Ok(self.take(width)?.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?[0])
    }

    /// A length of `width` bytes, at most four: it fits.
    fn number(&mut self, width: usize) -> Result<usize> {
        Ok(self.take(width)?.iter().fold(0, |value, &byte| value << 8 | usize::from(byte)))
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or_else(|| {
            malformed(format!("{len} bytes are announced at byte {}, and {} follow", self.at, rest.len()))
        })?;
        self.at += len;
        Ok(taken)
    }

    fn unexpected(&self, wanted: &str, byte: u8) -> Error {
        malformed(format!("{wanted} is expected at byte {}, and {byte:#04x} stands there", self.at - 1))
    }
}

fn malformed(why: String) -> Error {
    Error::new(ErrorKind::Malformed, format!("a payload's msgpack: {why}"))
}
