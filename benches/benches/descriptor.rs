//! Segment descriptors to and from JSON, and the layout of tensor sets.
#![allow(missing_docs, clippy::unwrap_used)]

use std::time::SystemTime;

use criterion::{Criterion, criterion_group, criterion_main};
use posthorse_core::{Access, Attributes, BufferDesc, DType, Location, SegmentDesc};
use posthorse_omni::TensorSet;
use posthorse_segment::{DescriptorLimits, descriptor};

fn segment(buffers: u64) -> SegmentDesc {
    let buffers = (0..buffers).map(|index| BufferDesc {
        region: None,
        location: Location::Any,
        address: 0x7f00_0000_0000 + index * 4096,
        len: 4096,
        access: Access::ReadWrite,
        token: None,
        attributes: Attributes::new(),
    });
    SegmentDesc {
        name: "10.0.0.1:15000".to_owned(),
        incarnation: None,
        hello: None,
        transports: Attributes::new(),
        buffers: buffers.collect(),
    }
}

fn descriptors(criterion: &mut Criterion) {
    for count in [1, 1000] {
        let desc = segment(count);
        let json = descriptor::encode(&desc, SystemTime::UNIX_EPOCH).unwrap();
        criterion.bench_function(&format!("descriptor of {count} buffers, encode"), |bencher| {
            bencher.iter(|| descriptor::encode(&desc, SystemTime::UNIX_EPOCH).unwrap());
        });
        criterion.bench_function(&format!("descriptor of {count} buffers, decode"), |bencher| {
            bencher.iter(|| descriptor::decode(&json, &DescriptorLimits::default()).unwrap());
        });
    }
}

fn layouts(criterion: &mut Criterion) {
    let bytes = vec![0_u8; 4096];
    let mut set = TensorSet::new();
    for layer in 0..56 {
        set.push(&format!("cache_{layer}"), DType::BF16, &[4, 4, 128], &bytes).unwrap();
    }
    criterion.bench_function("layout of 56 tensors", |bencher| bencher.iter(|| set.layout().unwrap()));
}

criterion_group!(benches, descriptors, layouts);
criterion_main!(benches);
