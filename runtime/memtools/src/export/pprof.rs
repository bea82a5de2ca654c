//! pprof's heap profile: gzipped protocol buffers, after `profile.proto` of google/pprof. Only the
//! fields that are written are declared.

use std::collections::HashMap;
use std::io::Write;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

use super::MemoryProfile;
use slabwise_pool::Tag;

#[derive(Clone, PartialEq, Message)]
pub(super) struct Profile {
    #[prost(message, repeated, tag = "1")]
    pub sample_type: Vec<ValueType>,
    #[prost(message, repeated, tag = "2")]
    pub sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    pub location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    pub function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    pub string_table: Vec<String>,
    #[prost(int64, tag = "9")]
    pub time_nanos: i64,
    #[prost(message, optional, tag = "11")]
    pub period_type: Option<ValueType>,
    #[prost(int64, repeated, tag = "13")]
    pub comment: Vec<i64>,
    #[prost(int64, tag = "14")]
    pub default_sample_type: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct ValueType {
    #[prost(int64, tag = "1")]
    pub kind: i64,
    #[prost(int64, tag = "2")]
    pub unit: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    pub location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    pub value: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Location {
    #[prost(uint64, tag = "1")]
    pub id: u64,
    #[prost(message, repeated, tag = "4")]
    pub line: Vec<Line>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Line {
    #[prost(uint64, tag = "1")]
    pub function_id: u64,
    #[prost(int64, tag = "2")]
    pub line: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Function {
    #[prost(uint64, tag = "1")]
    pub id: u64,
    #[prost(int64, tag = "2")]
    pub name: i64,
    #[prost(int64, tag = "3")]
    pub system_name: i64,
    #[prost(int64, tag = "4")]
    pub filename: i64,
    #[prost(int64, tag = "5")]
    pub start_line: i64,
}

/// A profile that is being filled: each text, function and location once.
#[derive(Default)]
struct Builder {
    profile: Profile,
    texts: HashMap<String, i64>,
    locations: HashMap<(String, String, u32), u64>,
}

impl Builder {
    fn text(&mut self, text: &str) -> i64 {
        if let Some(known) = self.texts.get(text) {
            return *known;
        }
        let index = self.profile.string_table.len() as i64;
        self.profile.string_table.push(text.into());
        self.texts.insert(text.into(), index);
        index
    }

    /// Functions and locations are one to one: a name at a line.
    fn location(&mut self, name: &str, file: &str, line: u32) -> u64 {
        let key = (name.to_string(), file.to_string(), line);
        if let Some(known) = self.locations.get(&key) {
            return *known;
        }
        let id = self.profile.location.len() as u64 + 1;
        let (name, filename, line) = (self.text(name), self.text(file), i64::from(line));
        self.profile.function.push(Function {
            id,
            name,
            system_name: name,
            filename,
            start_line: line,
        });
        self.profile.location.push(Location {
            id,
            line: vec![Line {
                function_id: id,
                line,
            }],
        });
        self.locations.insert(key, id);
        id
    }
}

/// The blocks in use as a heap profile with the sample types `allocations/count` and `space/bytes`.
/// Stacks are the tensor, its layer's path from the inside out, and the user's line. The bytes add
/// up to [`Statistics::bytes_in_use`](slabwise_pool::Statistics::bytes_in_use). `time` is when,
/// since 1970.
///
/// # Errors
/// Never, in memory; an error of the compressor.
pub fn heap_profile(memory: impl Into<MemoryProfile>, time: Duration) -> std::io::Result<Vec<u8>> {
    let MemoryProfile {
        manager, segments, ..
    } = memory.into();
    let mut held: Vec<(Tag, i64, i64)> = Vec::new();
    let mut known: HashMap<Tag, usize> = HashMap::new();
    for piece in segments
        .into_iter()
        .flat_map(|s| s.blocks)
        .filter(|piece| piece.requested.is_some())
    {
        let at = *known.entry(piece.tag.clone()).or_insert_with(|| {
            held.push((piece.tag, 0, 0));
            held.len() - 1
        });
        let sample = &mut held[at];
        (sample.1, sample.2) = (sample.1 + 1, sample.2 + piece.region.bytes as i64);
    }
    let mut b = Builder::default();
    b.text("");
    let [allocations, count, space, bytes] =
        ["allocations", "count", "space", "bytes"].map(|text| b.text(text));
    b.profile.sample_type = vec![
        ValueType {
            kind: allocations,
            unit: count,
        },
        ValueType {
            kind: space,
            unit: bytes,
        },
    ];
    (b.profile.period_type, b.profile.default_sample_type) = (
        Some(ValueType {
            kind: space,
            unit: bytes,
        }),
        space,
    );
    b.profile.time_nanos = i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
    let policy = b.text(&format!("memory managed by {manager}"));
    b.profile.comment = vec![policy];
    for (tag, count, bytes) in held {
        let (file, line) = tag.location.map_or(("", 0), |at| (at.file(), at.line()));
        let mut location_id = vec![b.location(&tag.name, file, line)];
        let mut layer = &*tag.layer;
        while !layer.is_empty() {
            location_id.push(b.location(layer, file, line));
            layer = layer.rsplit_once('/').map_or("", |(outer, _)| outer);
        }
        b.profile.sample.push(Sample {
            location_id,
            value: vec![count, bytes],
        });
    }
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(&b.profile.encode_to_vec())?;
    packed.finish()
}
