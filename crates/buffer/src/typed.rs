//! Bytes seen as elements: checked for size, shape and alignment, never copied.

use bytemuck::{AnyBitPattern, NoUninit};
use posthorse_core::{DType, Error, ErrorKind, Result};

use crate::buffer::ManagedBuffer;

/// Bytes with the element type and shape that they are to be read with.
///
/// Elements lie in row-major order without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorView<'a> {
    dtype: DType,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl<'a> TensorView<'a> {
    /// A view of `bytes` as elements of `dtype` in `shape` (element counts, outermost first).
    ///
    /// # Errors
    /// `TypeMismatch`, naming the numbers, when the shape does not need exactly these bytes, overflows, or
    /// when the bytes do not start at a multiple of the element's size.
    pub fn new(bytes: &'a [u8], dtype: DType, shape: &'a [usize]) -> Result<Self> {
        match dtype.bytes_of(shape) {
            Some(needed) if needed == bytes.len() => {}
            needed => return Err(wrong_shape(dtype.name(), dtype.size(), shape, needed, bytes.len())),
        }
        check_alignment(bytes, dtype.name(), dtype.size())?;
        Ok(Self { dtype, shape, bytes })
    }

    /// The element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Element counts, outermost first.
    pub const fn shape(&self) -> &'a [usize] {
        self.shape
    }

    /// The bytes.
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements as values of a Rust type of the same size (`u16` may carry a bfloat16).
    ///
    /// # Errors
    /// `TypeMismatch` when the size or the alignment is another.
    pub fn elements<T: AnyBitPattern>(&self) -> Result<&'a [T]> {
        if size_of::<T>() != self.dtype.size() {
            return Err(mismatch(format!(
                "{} has {} bytes, {} has {}",
                std::any::type_name::<T>(),
                size_of::<T>(),
                self.dtype,
                self.dtype.size()
            )));
        }
        elements(self.bytes)
    }
}

impl ManagedBuffer {
    /// The bytes as values of `T`.
    ///
    /// # Errors
    /// `TypeMismatch` when they are no whole number of values or lie at no address for them; `Unsupported` when
    /// the pool lies in a device's memory.
    pub fn typed<T: AnyBitPattern>(&self) -> Result<&[T]> {
        elements(self.bytes()?)
    }

    /// The bytes as values of `T`, to be written.
    ///
    /// # Errors
    /// As [`ManagedBuffer::typed`].
    pub fn typed_mut<T: AnyBitPattern + NoUninit>(&mut self) -> Result<&mut [T]> {
        let bytes = self.bytes_mut()?;
        check_elements::<T>(bytes)?;
        bytemuck::try_cast_slice_mut(bytes).map_err(|error| mismatch(error.to_string()))
    }

    /// The values of a tensor of `shape` (element counts, outermost first), in row-major order.
    ///
    /// # Errors
    /// As [`ManagedBuffer::typed`], and `TypeMismatch` when the shape does not need exactly these bytes.
    pub fn as_tensor<T: AnyBitPattern>(&self, shape: &[usize]) -> Result<&[T]> {
        let bytes = self.bytes()?;
        let needed = shape.iter().try_fold(size_of::<T>(), |bytes, &count| bytes.checked_mul(count));
        if needed != Some(bytes.len()) {
            let name = std::any::type_name::<T>();
            return Err(wrong_shape(name, size_of::<T>(), shape, needed, bytes.len()));
        }
        elements(bytes)
    }

    /// The bytes as a tensor whose element type is known at run time.
    ///
    /// # Errors
    /// As [`TensorView::new`], and `Unsupported` when the pool lies in a device's memory.
    pub fn tensor_view<'a>(&'a self, dtype: DType, shape: &'a [usize]) -> Result<TensorView<'a>> {
        TensorView::new(self.bytes()?, dtype, shape)
    }
}

fn elements<T: AnyBitPattern>(bytes: &[u8]) -> Result<&[T]> {
    check_elements::<T>(bytes)?;
    if bytes.is_empty() {
        return Ok(&[]);
    }
    bytemuck::try_cast_slice(bytes).map_err(|error| mismatch(error.to_string()))
}

fn check_elements<T>(bytes: &[u8]) -> Result<()> {
    let (name, size) = (std::any::type_name::<T>(), size_of::<T>());
    if size == 0 || !bytes.len().is_multiple_of(size) {
        return Err(mismatch(format!(
            "{} bytes are no whole number of {name}, which has {size}",
            bytes.len()
        )));
    }
    check_alignment(bytes, name, align_of::<T>())
}

fn check_alignment(bytes: &[u8], name: &str, alignment: usize) -> Result<()> {
    let address = bytes.as_ptr().addr();
    // No bytes lie anywhere.
    if bytes.is_empty() || address.is_multiple_of(alignment) {
        return Ok(());
    }
    Err(mismatch(format!("the bytes start at {address:#x}, and {name} needs a multiple of {alignment}")))
}

fn wrong_shape(name: &str, size: usize, shape: &[usize], needed: Option<usize>, have: usize) -> Error {
    let needed = needed
        .map_or_else(|| "more bytes than can be addressed".to_owned(), |bytes| format!("{bytes} bytes"));
    mismatch(format!(
        "the shape {shape:?} of {name} ({size} bytes each) needs {needed}, and there are {have}"
    ))
}

fn mismatch(message: String) -> Error {
    Error::new(ErrorKind::TypeMismatch, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_view_needs_exactly_its_bytes() {
        let words = [1_u64, 2, 3, 4];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let view = TensorView::new(bytes, DType::U64, &[2, 2]).unwrap();
        assert_eq!(view.elements::<u64>().unwrap(), words);
        assert_eq!((view.dtype(), view.shape(), view.bytes()), (DType::U64, &[2_usize, 2][..], bytes));
        let overflow = [usize::MAX, 2];
        for (dtype, shape, expected) in [
            (DType::U64, &[5][..], "needs 40 bytes, and there are 32"),
            (DType::U64, &[3], "needs 24 bytes, and there are 32"),
            (DType::F32, &[], "needs 4 bytes"),
            (DType::F32, &overflow, "more bytes than can be addressed"),
            (DType::F32, &[0, 8], "needs 0 bytes"),
        ] {
            let error = TensorView::new(bytes, dtype, shape).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TypeMismatch);
            assert!(error.message().contains(expected), "{error}");
        }
    }

    #[test]
    fn elements_need_their_size_and_alignment() {
        let words = [0_u64; 4];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let error = TensorView::new(&bytes[4..12], DType::U64, &[1]).unwrap_err();
        assert!(error.message().contains("uint64 needs a multiple of 8"), "{error}");
        let halves = TensorView::new(bytes, DType::BF16, &[16]).unwrap();
        assert_eq!(halves.elements::<u16>().unwrap().len(), 16);
        let error = halves.elements::<f32>().unwrap_err();
        assert!(error.message().contains("f32 has 4 bytes, bfloat16 has 2"), "{error}");
        assert!(elements::<u32>(&bytes[..6]).unwrap_err().message().contains("6 bytes"));
        assert!(elements::<()>(bytes).is_err());
    }

    #[test]
    fn an_empty_tensor_can_be_viewed_wherever_it_lies() {
        let words = [0_u64; 1];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let view = TensorView::new(&bytes[1..1], DType::F32, &[0, 7]).unwrap();
        assert!(view.elements::<f32>().unwrap().is_empty());
    }
}
