//! Deltas give back every byte for every number format, shape and cut; bytes that are no delta are
//! refused within the memory that the chunk's length allows.

use proptest::{collection::vec, prelude::*};
use protocol::{
    AdapterManifest, Assembly, Digest, ManifestError,
    delta::{self, DeltaError, Layout},
    frame::CHUNK_LEN,
};
use safetensors::{Dtype, tensor::TensorView};

const DTYPES: [Dtype; 17] = [
    Dtype::BOOL,
    Dtype::U8,
    Dtype::I8,
    Dtype::F8_E5M2,
    Dtype::F8_E4M3,
    Dtype::F8_E8M0,
    Dtype::I16,
    Dtype::U16,
    Dtype::F16,
    Dtype::BF16,
    Dtype::I32,
    Dtype::U32,
    Dtype::F32,
    Dtype::C64,
    Dtype::F64,
    Dtype::I64,
    Dtype::U64,
];

/// A safetensors file of these tensors, with bytes from `seed` on.
fn file(tensors: &[(Dtype, Vec<usize>)], seed: u8) -> Vec<u8> {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(dtype, shape)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (0..bytes).map(|at| (at as u8).wrapping_mul(31).wrapping_add(seed)).collect()
        })
        .collect();
    let views = tensors.iter().zip(&data).enumerate().map(|(at, ((dtype, shape), data))| {
        let view = TensorView::new(*dtype, shape.clone(), data).expect("sound");
        (format!("layer.{at}"), view)
    });
    safetensors::serialize(views, None).expect("sound")
}

fn tensors() -> impl Strategy<Value = Vec<(Dtype, Vec<usize>)>> {
    let dtype = prop::sample::select(DTYPES.to_vec());
    vec((dtype, vec(0_usize..9, 0..4)), 0..6)
}

proptest! {
    #[test]
    fn every_format_and_shape_comes_back_to_the_byte(
        tensors in tensors(),
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..40),
        cut in 1_usize..700,
    ) {
        let base = file(&tensors, 7);
        let mut new = base.clone();
        for (at, byte) in changes {
            let at = at.index(new.len());
            new[at] = byte;
        }
        let layout = Layout::of(&new);
        for start in (0..new.len()).step_by(cut) {
            let range = start..new.len().min(start + cut);
            let (old, chunk) = (&base[range.clone()], &new[range.clone()]);
            let packed = delta::encode(&layout, range, old, chunk).expect("packed");
            prop_assert_eq!(delta::decode(&packed, old).expect("unpacked"), chunk);
        }
    }

    #[test]
    fn files_that_are_no_safetensors_come_back_too(
        base in vec(any::<u8>(), 1..300), noise in vec(any::<u8>(), 300),
    ) {
        let new: Vec<u8> = base.iter().zip(&noise).map(|(a, b)| a ^ b).collect();
        let packed = delta::encode(&Layout::of(&new), 0..new.len(), &base, &new).expect("packed");
        prop_assert_eq!(delta::decode(&packed, &base).expect("unpacked"), new);
    }

    #[test]
    fn mutated_deltas_give_the_chunks_length_or_nothing(
        edits in vec((any::<prop::sample::Index>(), any::<u8>()), 1..5),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let shape = vec![(Dtype::F32, vec![50]), (Dtype::BF16, vec![31]), (Dtype::F64, vec![9])];
        let (base, new) = (file(&shape, 1), file(&shape, 2));
        let mut packed =
            delta::encode(&Layout::of(&new), 0..new.len(), &base, &new).expect("packed");
        for (at, byte) in edits {
            let at = at.index(packed.len());
            packed[at] = byte;
        }
        if let Some(cut) = cut {
            packed.truncate(cut.index(packed.len()));
        }
        if let Ok(chunk) = delta::decode(&packed, &base) {
            prop_assert_eq!(chunk.len(), base.len());
        }
    }
}

#[test]
fn numbers_are_sorted_by_their_width() {
    // The low bytes of every number change and nothing else.
    for (dtype, width) in [(Dtype::BF16, 2), (Dtype::F32, 4), (Dtype::F64, 8)] {
        let shape = vec![(dtype, vec![8192 / width])];
        let base = file(&shape, 3);
        let head = base.len() - 8192;
        let mut new = base.clone();
        for (number, at) in (head..new.len()).step_by(width).enumerate() {
            new[at] ^= Digest::of(&number.to_le_bytes()).0[0] | 1;
        }
        let layout = Layout::of(&new);
        let packed = delta::encode(&layout, 0..new.len(), &base, &new).expect("packed");
        assert!(packed.len() < 8192 / width + 200, "{dtype:?}: {} bytes", packed.len());
        let plain = delta::encode(&Layout::of(&[0]), 0..1, &[0], &[1]).expect("packed");
        assert!(plain.len() > 1, "a byte alone gains nothing");
    }
}

#[test]
fn bombs_and_wrong_descriptions_have_their_own_refusals() {
    let base = vec![7; 1000];
    let head = |len: u32, width: u8| {
        let mut bytes = vec![1, 1, 0];
        bytes.extend(len.to_le_bytes());
        bytes.push(width);
        bytes
    };
    let zeros = |len: usize| zstd::bulk::compress(&vec![0; len], 19).expect("packed");
    // A gibibyte in 50 kB: only as much is unpacked as there is room for.
    let bomb = {
        let mut encoder = zstd::Encoder::new(Vec::new(), 19).expect("an encoder");
        std::io::copy(&mut std::io::Read::take(std::io::repeat(0), 1 << 30), &mut encoder)
            .expect("packed");
        encoder.finish().expect("packed")
    };
    assert!(bomb.len() < 100_000);
    let cases = [
        (Vec::new(), DeltaError::Head),
        (vec![1, 0], DeltaError::Head),
        (vec![2, 0, 0], DeltaError::Head),
        (vec![1, 255, 255, 1, 1, 1, 1, 1], DeltaError::Head),
        (head(0, 1), DeltaError::Segment(0, 0, 1)),
        (head(1000, 3), DeltaError::Segment(0, 1000, 3)),
        (head(1000, 0), DeltaError::Segment(0, 1000, 0)),
        (head(999, 1), DeltaError::Length { got: 999, want: 1000 }),
        (head(u32::MAX, 4), DeltaError::Length { got: u32::MAX as usize, want: 1000 }),
        (head(1000, 1), DeltaError::Packed),
        ([head(1000, 1), zeros(999)].concat(), DeltaError::Packed),
        ([head(1000, 1), zeros(1001)].concat(), DeltaError::Packed),
        ([head(1000, 4), bomb].concat(), DeltaError::Packed),
    ];
    for (bytes, want) in cases {
        let error = delta::decode(&bytes, &base).expect_err("refused");
        assert_eq!(error, want);
        assert!(!error.to_string().contains('\n') && error.to_string().len() < 200, "{error}");
    }
    assert_eq!(delta::decode(&[head(1000, 4), zeros(1000)].concat(), &base), Ok(base));
}

/// Three chunks and a rest, the numbers a little changed.
fn broadcasts() -> (Vec<u8>, Vec<u8>) {
    let base: Vec<u8> = (0..CHUNK_LEN * 3 + 9).map(|at| (at / 3 % 251) as u8).collect();
    let new = base.iter().enumerate().map(|(at, byte)| byte ^ u8::from(at % 97 == 0)).collect();
    (base, new)
}

#[test]
fn an_assembly_takes_deltas_where_it_has_their_base_and_whole_chunks_anywhere() {
    let (base, new) = broadcasts();
    let weights = Digest::of(b"weights");
    let earlier = AdapterManifest::build(4, &weights, &base).expect("an adapter");
    let manifest = AdapterManifest::build(5, &weights, &new).expect("an adapter");
    let (manifest, deltas) = manifest.with_delta(&new, earlier.policy, &base);
    let start = || Assembly::new(manifest.clone()).expect("sound");

    let mut without = start();
    assert_eq!(without.delta(0), None);
    let delta = deltas[0].as_deref().expect("shorter");
    assert!(matches!(without.put_delta(0, delta), Err(ManifestError::NoSuchChunk { .. })));
    let other = start().with_base(&manifest.policy, base.clone().into());
    assert_eq!(other.delta(0), None, "another base");
    let cut = start().with_base(&earlier.policy, base[1..].to_vec().into());
    assert_eq!(cut.delta(0), None, "a base of another length");

    let mut assembly = start().with_base(&earlier.policy, base.clone().into());
    assembly.put(1, &new[CHUNK_LEN..2 * CHUNK_LEN]).expect("whole");
    for (index, delta) in deltas.iter().enumerate() {
        match delta {
            Some(delta) => {
                let mut flipped = delta.clone();
                flipped[10] ^= 1;
                let refused = assembly.put_delta(index, &flipped);
                assert!(matches!(refused, Err(ManifestError::Chunk { .. })));
                assembly.put_delta(index, delta).expect("as promised");
            }
            None => {
                assembly.put(index, &new[index * CHUNK_LEN..]).expect("whole");
            }
        }
    }
    assert_eq!(assembly.finish().expect("whole"), new);

    // A manifest that promises a delta which makes something else: the chunk's own digest counts.
    let (mut lying, deltas) = (manifest.clone(), deltas);
    lying.chunks[0] = Digest::of(b"another chunk");
    let mut assembly = Assembly::new(lying).expect("sound").with_base(&earlier.policy, base.into());
    let delta = deltas[0].as_deref().expect("shorter");
    assert!(matches!(assembly.put_delta(0, delta), Err(ManifestError::Chunk { chunk: 0, .. })));
    assert!(assembly.missing().any(|index| index == 0));
}
