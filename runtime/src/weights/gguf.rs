//! GGUF files, the format of llama.cpp: their headers, read and checked.
//!
//! The bytes `GGUF`, a version, the numbers of tensors and of entries of metadata, the entries, a
//! description of each tensor, and from the next multiple of the alignment on the tensors' data.
//! Nothing in a file is trusted: memory is taken for bytes that have been read, never for a number
//! that a header claims.

mod blocks;
mod numbers;
mod splits;
mod types;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::io::{self, BufReader, Read};

use slabwise_planner::brief;

pub(super) use numbers::numbers;
pub(super) use splits::splits;
pub(super) use types::{Elements, TensorType, readable};

/// The format's name in errors.
pub(super) const NAME: &str = "GGUF";

/// The first bytes of a file.
pub(super) const MAGIC: &[u8; 4] = b"GGUF";

/// The versions that are read. The first had counts of four bytes.
const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;

/// The most bytes of a header. Large vocabularies take some ten million.
const HEADER_MAX: u64 = 1 << 28;

/// The most axes of a tensor.
const AXES_MAX: u32 = 4;

/// The deepest nesting of arrays in metadata.
const NESTING_MAX: u32 = 8;

/// The metadata key of the alignment of tensors, and the alignment without it.
const ALIGNMENT: &str = "general.alignment";
const ALIGNMENT_DEFAULT: u64 = 32;

/// The fewest bytes of an entry of metadata (an empty name, a type, a value of one byte) and of the
/// description of a tensor (an empty name, no axes, a type, an offset).
const ENTRY_MIN: u64 = 8 + 4 + 1;
const TENSOR_MIN: u64 = 8 + 4 + 4 + 8;

/// The header's description of one tensor.
#[derive(Debug)]
pub(super) struct Info {
    pub(super) kind: &'static TensorType,
    /// Row-major, as everywhere here: the file has the fastest axis first.
    pub(super) shape: Vec<u64>,
    /// Its first byte in the file, and its bytes.
    pub(super) at: u64,
    pub(super) bytes: u64,
}

/// A header that was read and checked.
#[derive(Debug, Default)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, Info>,
    pub(super) metadata: BTreeMap<String, String>,
}

/// Why a file is not read.
#[derive(Debug)]
pub(super) enum Refused {
    /// The system's error.
    Read(io::Error),
    /// It is damaged; the text names the defect.
    Malformed(String),
    /// It is of a kind that is not read; the text names it and says what to do.
    Unsupported(String),
}

impl From<String> for Refused {
    fn from(detail: String) -> Refused {
        Refused::Malformed(detail)
    }
}

impl Header {
    /// Reads and checks the header of a file of `length` bytes, from its start on.
    ///
    /// # Errors
    /// If the file cannot be read, is damaged or of another version.
    pub(super) fn read(file: impl Read, length: u64) -> Result<Header, Refused> {
        let mut reader = Reader {
            bytes: BufReader::new(file),
            at: 0,
            length,
        };
        reader.header()
    }
}

/// A file, read from its start on.
struct Reader<R> {
    bytes: BufReader<R>,
    /// The bytes read, and those of the file.
    at: u64,
    length: u64,
}

impl<R: Read> Reader<R> {
    fn header(&mut self) -> Result<Header, Refused> {
        if self.array::<4>(&"the format's name")? != *MAGIC {
            return Err("it does not begin with `GGUF`".to_owned().into());
        }
        let version = self.u32(&"the version")?;
        if VERSIONS.contains(&version.swap_bytes()) {
            let detail = "it is a big-endian GGUF file, and little-endian ones are read: convert \
                          it with gguf_convert_endian.py of llama.cpp";
            return Err(Refused::Unsupported(detail.into()));
        }
        if !VERSIONS.contains(&version) {
            return Err(Refused::Unsupported(format!(
                "it is of version {version} of GGUF, and versions {} and {} are read: convert the \
                 model again with a llama.cpp that writes them",
                VERSIONS.start(),
                VERSIONS.end()
            )));
        }
        let tensors = self.count(&"the number of tensors", TENSOR_MIN)?;
        let entries = self.count(&"the number of entries of metadata", ENTRY_MIN)?;
        let mut header = Header::default();
        let mut alignment = ALIGNMENT_DEFAULT;
        for number in 0..entries {
            let name = self.name(&format_args!("the name of entry {number} of metadata"))?;
            let of = format!("the entry `{}` of metadata", brief(&name));
            let kind = Kind::of(self.u32(&of)?, &of)?;
            let value = self.value(kind, &of, 0)?;
            if name == ALIGNMENT {
                alignment = aligned(kind, &value)?;
            }
            match header.metadata.entry(name) {
                Entry::Vacant(slot) => drop(slot.insert(value)),
                Entry::Occupied(_) => return Err(format!("it has {of} twice").into()),
            }
        }
        for number in 0..tensors {
            let name = self.name(&format_args!("the name of tensor {number}"))?;
            let of = format!("tensor `{}`", brief(&name));
            let info = self.tensor(&of)?;
            match header.tensors.entry(name) {
                Entry::Vacant(slot) => drop(slot.insert(info)),
                Entry::Occupied(_) => return Err(format!("it has {of} twice").into()),
            }
        }
        place(&mut header.tensors, self.at, alignment, self.length)?;
        Ok(header)
    }

    /// The description of a tensor, whose place is that of its offset.
    fn tensor(&mut self, of: &dyn fmt::Display) -> Result<Info, Refused> {
        let axes = self.u32(of)?;
        if axes > AXES_MAX {
            return Err(format!("{of} has {axes} axes, and {AXES_MAX} is the most").into());
        }
        let mut shape = Vec::new();
        for _ in 0..axes {
            shape.push(self.u64(of)?);
        }
        let id = self.u32(of)?;
        let Some(kind) = TensorType::of(id) else {
            return Err(format!("{of} has the unknown type {id}").into());
        };
        let at = self.u64(of)?;
        // A row of no elements is whole blocks.
        let row = shape.first().copied().unwrap_or(1);
        let (name, block) = (kind.name, kind.values as u64);
        shape.reverse();
        if !row.is_multiple_of(block) {
            return Err(format!(
                "{of} of the shape {shape:?} has rows of {row} elements, which are not whole \
                 blocks of {name}, {block} elements each"
            )
            .into());
        }
        // Elements are counted in f32 too, which blocks are decoded to. Axes of no length do not
        // hide others that cannot be counted.
        let elements = shape
            .iter()
            .try_fold(1u64, |product, &n| product.checked_mul(n.max(1)));
        let countable = elements.filter(|&n| n <= i64::MAX as u64 / 8);
        let Some(elements) = countable else {
            let detail =
                format!("{of} of the shape {shape:?} has more elements than can be counted");
            return Err(detail.into());
        };
        let elements = if shape.contains(&0) { 0 } else { elements };
        Ok(Info {
            kind,
            shape,
            at,
            bytes: elements / block * kind.bytes as u64,
        })
    }

    /// A value of metadata as text: numbers and bools as they are written in Rust, strings as they
    /// are, and of an array the type and the length, as in `[string; 32000]`.
    fn value(&mut self, kind: Kind, of: &dyn fmt::Display, depth: u32) -> Result<String, Refused> {
        Ok(match kind {
            Kind::U8 => self.array::<1>(of)?[0].to_string(),
            Kind::I8 => i8::from_le_bytes(self.array(of)?).to_string(),
            Kind::U16 => u16::from_le_bytes(self.array(of)?).to_string(),
            Kind::I16 => i16::from_le_bytes(self.array(of)?).to_string(),
            Kind::U32 => self.u32(of)?.to_string(),
            Kind::I32 => i32::from_le_bytes(self.array(of)?).to_string(),
            Kind::F32 => f32::from_le_bytes(self.array(of)?).to_string(),
            Kind::U64 => self.u64(of)?.to_string(),
            Kind::I64 => i64::from_le_bytes(self.array(of)?).to_string(),
            Kind::F64 => f64::from_le_bytes(self.array(of)?).to_string(),
            Kind::Bool => match self.array::<1>(of)? {
                [0] => "false".into(),
                [1] => "true".into(),
                [other] => return Err(format!("{of} is the bool {other}, not 0 or 1").into()),
            },
            Kind::String => {
                let bytes = self.string(of)?;
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::Array => {
                let (inner, length) = self.skip_array(of, depth)?;
                format!("[{}; {length}]", inner.name())
            }
        })
    }

    /// Reads an array of metadata, and gives the type of its elements and its length.
    fn skip_array(&mut self, of: &dyn fmt::Display, depth: u32) -> Result<(Kind, u64), Refused> {
        if depth >= NESTING_MAX {
            return Err(format!("{of} has arrays in arrays, more than {NESTING_MAX} deep").into());
        }
        let inner = Kind::of(self.u32(of)?, of)?;
        let length = self.count(of, inner.bytes_min())?;
        match inner {
            Kind::String => {
                for _ in 0..length {
                    let bytes = self.u64(of)?;
                    self.skip(bytes, of)?;
                }
            }
            Kind::Array => {
                for _ in 0..length {
                    self.skip_array(of, depth + 1)?;
                }
            }
            _ => self.skip(length * inner.bytes_min(), of)?,
        }
        Ok((inner, length))
    }

    /// The bytes that are left in the file, or to the most bytes of a header.
    fn left(&self) -> u64 {
        self.length.min(HEADER_MAX).saturating_sub(self.at)
    }

    /// Fails if so many bytes of `of` are not there.
    fn need(&mut self, bytes: u64, of: &dyn fmt::Display) -> Result<(), Refused> {
        let left = self.left();
        if bytes <= left {
            self.at += bytes;
            return Ok(());
        }
        Err(match self.length > HEADER_MAX {
            true => format!("its header has more than {HEADER_MAX} bytes, at {of}"),
            false => format!("{of} takes {bytes} bytes, but only {left} follow"),
        }
        .into())
    }

    fn array<const N: usize>(&mut self, of: &dyn fmt::Display) -> Result<[u8; N], Refused> {
        self.need(N as u64, of)?;
        let mut bytes = [0; N];
        self.bytes.read_exact(&mut bytes).map_err(Refused::Read)?;
        Ok(bytes)
    }

    fn u32(&mut self, of: &dyn fmt::Display) -> Result<u32, Refused> {
        self.array(of).map(u32::from_le_bytes)
    }

    fn u64(&mut self, of: &dyn fmt::Display) -> Result<u64, Refused> {
        self.array(of).map(u64::from_le_bytes)
    }

    /// A number of things that take at least `least` bytes each.
    fn count(&mut self, of: &dyn fmt::Display, least: u64) -> Result<u64, Refused> {
        let count = self.u64(of)?;
        let left = self.left();
        if count > left / least {
            return Err(format!("{of} would be {count}, but only {left} bytes follow").into());
        }
        Ok(count)
    }

    fn string(&mut self, of: &dyn fmt::Display) -> Result<Vec<u8>, Refused> {
        let length = self.u64(of)?;
        self.need(length, of)?;
        let mut bytes = Vec::new();
        let read = (&mut self.bytes).take(length).read_to_end(&mut bytes);
        let read = read.map_err(Refused::Read)?;
        if read as u64 != length {
            return Err(Refused::Read(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(bytes)
    }

    fn name(&mut self, of: &dyn fmt::Display) -> Result<String, Refused> {
        let bytes = self.string(of)?;
        String::from_utf8(bytes).map_err(|_| format!("{of} is not UTF-8").into())
    }

    fn skip(&mut self, bytes: u64, of: &dyn fmt::Display) -> Result<(), Refused> {
        self.need(bytes, of)?;
        let skipped = io::copy(&mut (&mut self.bytes).take(bytes), &mut io::sink());
        match skipped.map_err(Refused::Read)? == bytes {
            true => Ok(()),
            false => Err(Refused::Read(io::ErrorKind::UnexpectedEof.into())),
        }
    }
}

/// The alignment of tensors' data, by its entry in the metadata.
fn aligned(kind: Kind, value: &str) -> Result<u64, String> {
    let number = value.parse::<u64>().ok();
    let number = number.filter(|n| kind == Kind::U32 && n.is_power_of_two());
    number.ok_or_else(|| {
        let kind = kind.name();
        format!(
            "{ALIGNMENT} is {} ({kind}), not a power of two (u32)",
            brief(value)
        )
    })
}

/// Turns the offsets of tensors into places in a file of `length` bytes, whose header has `header`.
fn place(
    tensors: &mut BTreeMap<String, Info>,
    header: u64,
    alignment: u64,
    length: u64,
) -> Result<(), String> {
    let start = header.next_multiple_of(alignment);
    for (name, info) in tensors.iter_mut() {
        let (offset, bytes) = (info.at, info.bytes);
        let name = brief(name);
        if !offset.is_multiple_of(alignment) {
            return Err(format!(
                "tensor `{name}` begins at the offset {offset}, which is not a multiple of the \
                 alignment {alignment}"
            ));
        }
        let at = start.checked_add(offset);
        let end = at.and_then(|at| at.checked_add(bytes));
        match (at, end) {
            (Some(at), Some(end)) if end <= length => info.at = at,
            _ => {
                let data = length.saturating_sub(start);
                return Err(format!(
                    "tensor `{name}` takes {bytes} bytes from the offset {offset} on, but only \
                     {data} bytes follow the header"
                ));
            }
        }
    }
    let mut order: Vec<(&String, &Info)> = tensors.iter().filter(|(_, i)| i.bytes > 0).collect();
    order.sort_by_key(|(_, info)| info.at);
    for two in order.windows(2) {
        let [(one, first), (other, second)] = [two[0], two[1]];
        if first.at + first.bytes > second.at {
            let (one, other) = (brief(one), brief(other));
            return Err(format!("tensors `{one}` and `{other}` overlap"));
        }
    }
    Ok(())
}

/// The types of metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Kind {
    /// All of them, in the order of their numbers in files.
    const ALL: [Kind; 13] = [
        Kind::U8,
        Kind::I8,
        Kind::U16,
        Kind::I16,
        Kind::U32,
        Kind::I32,
        Kind::F32,
        Kind::Bool,
        Kind::String,
        Kind::Array,
        Kind::U64,
        Kind::I64,
        Kind::F64,
    ];

    fn of(number: u32, of: &dyn fmt::Display) -> Result<Kind, String> {
        let kind = Kind::ALL.get(number as usize).copied();
        kind.ok_or_else(|| format!("{of} has the unknown type {number}"))
    }

    fn name(self) -> &'static str {
        match self {
            Kind::U8 => "u8",
            Kind::I8 => "i8",
            Kind::U16 => "u16",
            Kind::I16 => "i16",
            Kind::U32 => "u32",
            Kind::I32 => "i32",
            Kind::F32 => "f32",
            Kind::Bool => "bool",
            Kind::String => "string",
            Kind::Array => "array",
            Kind::U64 => "u64",
            Kind::I64 => "i64",
            Kind::F64 => "f64",
        }
    }

    /// The bytes of a value; of a string or an array, those of an empty one.
    fn bytes_min(self) -> u64 {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => 1,
            Kind::U16 | Kind::I16 => 2,
            Kind::U32 | Kind::I32 | Kind::F32 => 4,
            Kind::U64 | Kind::I64 | Kind::F64 | Kind::String => 8,
            Kind::Array => 12,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with an entry of metadata of each form and two tensors.
    fn file() -> Vec<u8> {
        let mut bytes = [&MAGIC[..], &3u32.to_le_bytes()].concat();
        let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
        for count in [2u64, 4] {
            bytes.extend(count.to_le_bytes());
        }
        let array = [&8u32.to_le_bytes()[..], &1u64.to_le_bytes(), &string("ab")].concat();
        let numbers = [&4u32.to_le_bytes()[..], &1u64.to_le_bytes(), &[0; 4]].concat();
        for (name, kind, value) in [
            (ALIGNMENT, 4u32, 32u32.to_le_bytes().to_vec()),
            ("text", 8, string("ab")),
            ("list", 9, array),
            ("numbers", 9, numbers),
        ] {
            bytes.extend(string(name));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(value);
        }
        for (name, axes, kind, offset) in [("v", &[32u64, 2][..], 2u32, 0u64), ("w", &[3], 0, 64)] {
            bytes.extend(string(name));
            bytes.extend((axes.len() as u32).to_le_bytes());
            axes.iter().for_each(|n| bytes.extend(n.to_le_bytes()));
            bytes.extend(kind.to_le_bytes());
            bytes.extend(offset.to_le_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(32) + 76, 0x11);
        bytes
    }

    /// A header that is accepted describes bytes of the file.
    fn read(bytes: &[u8]) -> bool {
        let length = bytes.len() as u64;
        match Header::read(bytes, length) {
            Ok(header) => {
                let mut tensors = header.tensors.values();
                assert!(tensors.all(|info| info.at + info.bytes <= length));
                true
            }
            Err(Refused::Read(error)) => panic!("bytes that are there: {error}"),
            Err(Refused::Malformed(_) | Refused::Unsupported(_)) => false,
        }
    }

    #[test]
    fn every_prefix_and_every_changed_byte_of_a_header_is_read_or_refused() {
        let whole = file();
        assert!(read(&whole));
        for length in 0..whole.len() {
            assert!(!read(&whole[..length]), "{length} bytes");
        }
        let mut readable = 0;
        for at in 0..whole.len() - 76 {
            for change in 1..=255 {
                let mut bytes = whole.clone();
                bytes[at] ^= change;
                readable += usize::from(read(&bytes));
            }
        }
        // Letters of names, values of metadata and smaller shapes.
        assert!(
            readable > 1000 && readable < 255 * whole.len() / 2,
            "{readable}"
        );
    }
}
