//! The header of an `.npy` file: a literal of Python.

use std::io::Read;
use std::path::Path;

use slabwise_planner::brief;

use super::{fill, io_error, malformed};
use crate::data::HostArray;
use crate::error::DataError;

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// The most bytes of a header: NumPy reads 10,000.
const BYTES_MAX: usize = 1 << 16;
/// The most axes of an array of NumPy's.
const AXES_MAX: usize = 64;
/// NumPy aligns elements to this many bytes.
const ALIGN: usize = 64;

/// A type of elements in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    F16,
    BF16,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    Bool,
}

impl Stored {
    /// The type of a descriptor, such as `f4`.
    fn of(name: &str) -> Option<Stored> {
        Some(match name {
            "f2" => Stored::F16,
            "V2" => Stored::BF16,
            "f4" => Stored::F32,
            "f8" => Stored::F64,
            "i1" => Stored::I8,
            "i2" => Stored::I16,
            "i4" => Stored::I32,
            "i8" => Stored::I64,
            "u1" => Stored::U8,
            "u2" => Stored::U16,
            "u4" => Stored::U32,
            "u8" => Stored::U64,
            "b1" => Stored::Bool,
            _ => return None,
        })
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Stored::I8 | Stored::U8 | Stored::Bool => 1,
            Stored::F16 | Stored::BF16 | Stored::I16 | Stored::U16 => 2,
            Stored::F32 | Stored::I32 | Stored::U32 => 4,
            Stored::F64 | Stored::I64 | Stored::U64 => 8,
        }
    }
}

/// The contents of a header.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub stored: Stored,
    pub big_endian: bool,
    /// Whether the first axis is contiguous, as in Fortran.
    pub column_major: bool,
    pub shape: Vec<usize>,
    /// Bytes before the elements.
    pub bytes: u64,
}

/// Reads the bytes before the elements.
pub(super) fn read(path: &Path, reader: &mut impl Read) -> Result<Header, DataError> {
    let not_npy = |detail: String| malformed(path, format!("it is no .npy file: {detail}"));
    let mut take = |bytes: &mut [u8]| -> Result<(), DataError> {
        let got = fill(reader, bytes).map_err(|source| io_error(path, source))?;
        if got < bytes.len() {
            return Err(not_npy("it ends inside of its header".into()));
        }
        Ok(())
    };
    let mut start = [0; 8];
    take(&mut start)?;
    if start[..6] != *MAGIC {
        return Err(not_npy(format!(
            "its first bytes are {:02x?}, not those of NumPy",
            &start[..6]
        )));
    }
    let (length, before) = match start[6] {
        1 => {
            let mut length = [0; 2];
            take(&mut length)?;
            (u32::from(u16::from_le_bytes(length)), 10)
        }
        2 | 3 => {
            let mut length = [0; 4];
            take(&mut length)?;
            (u32::from_le_bytes(length), 12)
        }
        other => {
            return Err(not_npy(format!(
                "its version is {other}; versions 1 to 3 are read"
            )));
        }
    };
    let length = length as usize;
    if length > BYTES_MAX {
        return Err(not_npy(format!(
            "its header declares {length} bytes, more than the {BYTES_MAX} read at most"
        )));
    }
    let mut text = vec![0; length];
    take(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    let mut header = parse(&text).map_err(|detail| {
        let text = brief(text.trim_end()).to_string();
        malformed(path, format!("its header is \"{text}\": {detail}"))
    })?;
    header.bytes = before + length as u64;
    Ok(header)
}

/// Parses a header's dictionary; an error says what is wrong with it.
fn parse(text: &str) -> Result<Header, String> {
    let mut literal = Literal { rest: text };
    let (mut stored, mut column_major, mut shape) = (None, None, None);
    literal.expect('{')?;
    while !literal.accept('}') {
        let key = literal.string()?;
        literal.expect(':')?;
        match key {
            "descr" => stored = Some(literal.element()?),
            "fortran_order" => column_major = Some(literal.truth()?),
            "shape" => shape = Some(literal.shape()?),
            other => return Err(format!("the key \"{}\" has no meaning", brief(other))),
        }
        if !literal.accept(',') {
            literal.expect('}')?;
            break;
        }
    }
    let lacks = |key: &str| format!("it lacks \"{key}\"");
    let (stored, big_endian) = stored.ok_or_else(|| lacks("descr"))?;
    Ok(Header {
        stored,
        big_endian,
        column_major: column_major.ok_or_else(|| lacks("fortran_order"))?,
        shape: shape.ok_or_else(|| lacks("shape"))?,
        bytes: 0,
    })
}

/// A literal of Python that is read from its start.
struct Literal<'a> {
    rest: &'a str,
}

impl<'a> Literal<'a> {
    /// Skips a mark, if it comes next.
    fn accept(&mut self, mark: char) -> bool {
        self.rest = self.rest.trim_start();
        let rest = self.rest.strip_prefix(mark);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn expect(&mut self, mark: char) -> Result<(), String> {
        if self.accept(mark) {
            return Ok(());
        }
        Err(format!("\"{mark}\" is missing"))
    }

    fn string(&mut self) -> Result<&'a str, String> {
        self.rest = self.rest.trim_start();
        let quote = self.rest.chars().next().filter(|&c| c == '\'' || c == '"');
        let text = quote.and_then(|quote| self.rest[1..].split_once(quote));
        let (text, rest) = text.ok_or("a text in quotes is missing")?;
        self.rest = rest;
        Ok(text)
    }

    fn truth(&mut self) -> Result<bool, String> {
        self.rest = self.rest.trim_start();
        for (word, value) in [("True", true), ("False", false)] {
            if let Some(rest) = self.rest.strip_prefix(word) {
                self.rest = rest;
                return Ok(value);
            }
        }
        Err("\"fortran_order\" is neither True nor False".into())
    }

    /// A type of elements, and whether its bytes begin with the most significant.
    fn element(&mut self) -> Result<(Stored, bool), String> {
        if self.rest.trim_start().starts_with(['[', '(']) {
            return Err("its elements are records; save each field as an array of its own".into());
        }
        let text = self.string()?;
        let (order, name) = match text.split_at_checked(1) {
            Some((order @ ("<" | ">" | "|" | "="), name)) => (order, name),
            _ => ("", text),
        };
        let stored = Stored::of(name).ok_or_else(|| {
            let kind = match name.chars().next() {
                Some('O') => "objects of Python, whose pickle could run code",
                Some('U' | 'S' | 'a') => "texts",
                Some('M' | 'm') => "dates or durations",
                Some('c') => "complex numbers",
                Some('V') => "raw bytes",
                _ => "not of a type that is read",
            };
            format!(
                "its elements are {kind} (\"{}\"); save an array of numbers or truth values",
                brief(text)
            )
        })?;
        Ok((
            stored,
            order == ">" || (order == "=" && cfg!(target_endian = "big")),
        ))
    }

    fn shape(&mut self) -> Result<Vec<usize>, String> {
        let mut shape = Vec::new();
        self.expect('(')?;
        while !self.accept(')') {
            let end = self.rest.find(|c: char| !c.is_ascii_digit());
            let (digits, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
            let length = digits.parse::<usize>();
            let length = length.map_err(|_| "its shape is no tuple of lengths from 0 to 2^64 - 1");
            shape.push(length?);
            // Python 2 marks long integers.
            self.rest = rest.strip_prefix('L').unwrap_or(rest);
            if shape.len() > AXES_MAX {
                return Err(format!("its shape has more than {AXES_MAX} axes"));
            }
            if !self.accept(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(shape)
    }
}

/// The bytes before the elements of an array.
pub(super) fn written(array: &HostArray) -> Vec<u8> {
    let descr = match array {
        HostArray::F32(_) | HostArray::BF16(_) => "<f4",
        HostArray::F16(_) => "<f2",
        HostArray::I32(_) => "<i4",
        HostArray::U8(_) => "|u1",
        HostArray::Bool(_) => "|b1",
    };
    let lengths = array.shape().iter().map(|n| format!("{n}, "));
    let shape: String = lengths.collect();
    let shape = match array.shape().len() {
        1 => shape.trim_end(),
        _ => shape.trim_end_matches(", "),
    };
    let mut text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), }}");
    let unpadded = MAGIC.len() + 4 + text.len() + 1;
    text.push_str(&" ".repeat(unpadded.next_multiple_of(ALIGN) - unpadded));
    text.push('\n');
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    // At most 64 axes of 20 digits: far below 64 KiB.
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.into_bytes());
    bytes
}
