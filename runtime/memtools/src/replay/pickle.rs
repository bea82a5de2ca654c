//! Pickled snapshots as JSON, so that one reader reads both formats.
//!
//! A pickle is a program for a stack machine ("pickletools" in Python's library documents its
//! opcodes), and the library `deser-pickle` runs it without recursion: values are rows of a table,
//! and shared values stay shared. Only pickles of plain data get that far, because each call of
//! Python that the library records copies its arguments. Fields that a snapshot's reader does not
//! know are dropped when they are read.

use deser_core::de::{DeserializeDriver, Sink, SinkHandle};
use deser_core::{Atom, Error, ErrorKind, State};
use deser_pickle::{Deserializer, DeserializerConfig, take_shared_id};

/// The most bytes of a pickle: the library's table has some 150 bytes for each.
const PICKLE_MAX: usize = 1 << 27;

/// The most bytes of JSON for each byte of a pickle; lists that are not shared have fewer.
const TEXT_PER_BYTE: usize = 16;

/// The most events of values that are reached again, for each byte of a pickle. The library walks
/// the shared stack frames of allocations although they are dropped: some 6 events for each byte.
const SHARED_EVENTS_PER_BYTE: usize = 64;

/// The data of a pickle as JSON, with the given keys of dictionaries only; numbers beyond 64 bits
/// and values that are neither numbers nor text become `null`.
///
/// # Errors
/// The byte at which it is not a pickle of plain data, or the limit that it exceeds.
pub(super) fn to_json(bytes: &[u8], keys: &'static [&'static str]) -> Result<String, String> {
    if bytes.len() > PICKLE_MAX {
        return Err(format!(
            "a pickle of {} bytes; at most {PICKLE_MAX} are read: write the snapshot as JSON",
            bytes.len()
        ));
    }
    plain(bytes).map_err(|at| format!("byte {at}: not a pickle of numbers, text, lists and dictionaries alone, or it is cut short"))?;
    let mut json = Json {
        text: String::new(),
        text_max: TEXT_PER_BYTE * bytes.len(),
        open: Vec::new(),
        is_key: false,
        skips: false,
        keys,
    };
    let config =
        DeserializerConfig::builder().max_shared_events(SHARED_EVENTS_PER_BYTE * bytes.len());
    let mut pickle = Deserializer::from_slice_with_config(bytes, config.build());
    pickle
        .drive(&mut DeserializeDriver::from_fn(|_| {
            SinkHandle::to(&mut json)
        }))
        .map_err(|error| match error.offset() {
            Some(at) => format!("byte {at}: {}", error.message()),
            None => error.message().to_string(),
        })?;
    Ok(json.text)
}

/// Checks that all opcodes up to the end make plain data; an error is the place of one that does
/// not, or that is cut off.
fn plain(bytes: &[u8]) -> Result<(), usize> {
    let mut at = 0;
    loop {
        let rest = bytes.get(at + 1..).ok_or(at)?;
        let line = || {
            rest.iter()
                .position(|byte| *byte == b'\n')
                .map(|end| end + 1)
        };
        // The length of data after a little-endian length of so many bytes.
        let data = |width: usize| {
            let length = rest.get(..width)?.iter().rev();
            let length = length.fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
            width.checked_add(usize::try_from(length).ok()?)
        };
        let operand = match bytes[at] {
            b'.' => return Ok(()),
            opcode if b"(012N])}ltdaesu\x85\x86\x87\x88\x89\x94".contains(&opcode) => Some(0),
            0x80 | b'K' | b'q' | b'h' => Some(1),
            b'M' => Some(2),
            b'J' | b'r' | b'j' => Some(4),
            b'G' | 0x95 => Some(8),
            b'F' | b'I' | b'L' | b'V' | b'p' | b'g' => line(),
            0x8a | 0x8c | b'C' | b'U' => data(1),
            0x8b | b'X' | b'B' | b'T' => data(4),
            0x8d | 0x8e => data(8),
            _ => None,
        };
        match operand {
            Some(length) if length < rest.len() => at += 1 + length,
            _ => return Err(at),
        }
    }
}

/// JSON, while it is written.
struct Json {
    text: String,
    text_max: usize,
    /// The text that ends each open value.
    open: Vec<&'static str>,
    /// Whether the next value is a key.
    is_key: bool,
    /// Whether the next value is that of a key that is not known.
    skips: bool,
    keys: &'static [&'static str],
}

impl<'de> Sink<'de> for Json {
    fn atom(&mut self, atom: Atom, _: &mut State) -> Result<(), Error> {
        self.open.push("");
        if self.is_key {
            let key = match &atom {
                Atom::Str(key) => self.keys.iter().find(|known| ***known == **key),
                _ => None,
            };
            self.skips = key.is_none();
            if let Some(key) = key {
                let comma = if self.text.ends_with('{') { "" } else { "," };
                self.text += &format!("{comma}\"{key}\":");
            }
        } else {
            self.text += &match atom {
                Atom::Str(text) => serde_json::Value::from(&*text).to_string(),
                Atom::U64(number) => number.to_string(),
                Atom::I64(number) => number.to_string(),
                _ => "null".to_string(),
            };
        }
        if self.text.len() > self.text_max {
            return Err(refused("its data is much larger than the pickle"));
        }
        Ok(())
    }

    fn map(&mut self, _: &mut State) -> Result<(), Error> {
        self.begin('{', "}")
    }

    fn seq(&mut self, state: &mut State) -> Result<(), Error> {
        if take_shared_id(state).is_some() {
            return Err(refused("its lists are shared"));
        }
        self.begin('[', "]")
    }

    fn next_key(&mut self, _: &mut State) -> Result<SinkHandle<'_, 'de>, Error> {
        self.is_key = true;
        Ok(SinkHandle::to(self))
    }

    fn next_value(&mut self, _: &mut State) -> Result<SinkHandle<'_, 'de>, Error> {
        self.is_key = false;
        if std::mem::take(&mut self.skips) {
            return Ok(SinkHandle::null());
        }
        if self.open.last() == Some(&"]") && !self.text.ends_with('[') {
            self.text.push(',');
        }
        Ok(SinkHandle::to(self))
    }

    fn finish(&mut self, _: &mut State) -> Result<(), Error> {
        self.text.extend(self.open.pop());
        Ok(())
    }
}

impl Json {
    fn begin(&mut self, start: char, end: &'static str) -> Result<(), Error> {
        if self.is_key {
            return Err(refused("a key is not text"));
        }
        self.text.push(start);
        self.open.push(end);
        Ok(())
    }
}

fn refused(message: &'static str) -> Error {
    Error::new(ErrorKind::LimitExceeded, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn json(bytes: &[u8]) -> Result<String, String> {
        to_json(bytes, &["a", "b"])
    }

    #[test]
    fn plain_data_of_every_protocol_is_read() {
        // pickle.dumps({"a": [1, 300, -5, 2**40, 2**70], "c": [2], "b": (None, 1.5, "z")},
        // protocol) of CPython 3.
        let dumps: [&[u8]; 3] = [
            b"(dp0\nVa\np1\n(lp2\nI1\naI300\naI-5\naL1099511627776L\naL11805916207174113034\
              24L\nasVc\np3\n(lp4\nI2\nasVb\np5\n(NF1.5\nVz\np6\ntp7\ns.",
            b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01M,\x01J\xfb\xff\xff\xff\x8a\
              \x06\x00\x00\x00\x00\x00\x01\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00@eX\x01\x00\
              \x00\x00cq\x03]q\x04K\x02aX\x01\x00\x00\x00bq\x05NG?\xf8\x00\x00\x00\x00\x00\x00\
              X\x01\x00\x00\x00zq\x06\x87q\x07u.",
            b"\x80\x04\x95G\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01M,\x01\
              J\xfb\xff\xff\xff\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\x09\x00\x00\x00\x00\x00\
              \x00\x00\x00@e\x8c\x01c\x94]\x94K\x02a\x8c\x01b\x94NG?\xf8\x00\x00\x00\x00\x00\
              \x00\x8c\x01z\x94\x87\x94u.",
        ];
        for dump in dumps {
            assert_eq!(
                json(dump).as_deref(),
                Ok(r#"{"a":[1,300,-5,1099511627776,null],"b":[null,null,"z"]}"#)
            );
        }
    }

    #[test]
    fn hostile_pickles_are_refused_or_stay_small() {
        // Sharing: each tuple holds the one before twice.
        let mut bomb = vec![b']'];
        bomb.extend([b'2', 0x86].repeat(1000));
        bomb.push(b'.');
        assert!(json(&bomb).is_err_and(|error| error.contains("shared")));
        // The same in a field that is dropped, by little and by much.
        let dropped = |times| {
            let tuples = [b'2', 0x86].repeat(times);
            json(&[b"}X\x01\0\0\0c]", &*tuples, b"s."].concat())
        };
        assert_eq!(dropped(8).as_deref(), Ok("{}"));
        assert!(dropped(200).is_err_and(|error| error.contains("too often")));
        // One long text, many times.
        let mut long = b"](X\0\x10\0\0".to_vec();
        long.extend([b'x'; 1 << 12]);
        long.extend(b"q\0");
        long.extend(b"h\0".repeat(1000));
        long.extend(b"e.");
        assert!(json(&long).is_err_and(|error| error.contains("larger")));
        // Depth: nothing recurses.
        let mut deep = vec![b']'];
        deep.extend([0x85].repeat(1_000_000));
        deep.push(b'.');
        assert!(json(&deep).is_ok());
        // Many arguments, copied by each call.
        let mut calls = b"cset\nset\nq\0(".to_vec();
        calls.extend([b'N'; 1000]);
        calls.extend(b"tq\x01");
        calls.extend(b"h\0h\x01R".repeat(1000));
        calls.push(b'.');
        assert_eq!(
            json(&calls),
            Err("byte 0: not a pickle of numbers, text, lists and dictionaries alone, or it is cut short".into())
        );
        // A slot of the memo, a text and a frame far beyond the file; a list in itself; a list as a
        // key; no value.
        for bytes in [
            &b"]r\xff\xff\xff\xff0h\0."[..],
            b"X\xff\xff\xff\xffabc.",
            b"\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc.",
            b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN.",
            b"]q\0h\0a.",
            b"})Ns.",
            b".",
            b"",
        ] {
            assert!(json(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn damaged_pickles_are_refused_and_nothing_panics() {
        let whole = b"\x80\x02}q\0(X\x01\0\0\0aq\x01]q\x02(K\x01M,\x01eu.";
        assert!(json(whole).is_ok());
        for length in 0..whole.len() {
            assert!(json(&whole[..length]).is_err(), "cut to {length} bytes");
        }
        arbtest::arbtest(|u| {
            let mut bytes = whole.to_vec();
            for _ in 0..u.int_in_range(1..=4)? {
                let at = u.choose_index(bytes.len())?;
                bytes[at] = u.arbitrary()?;
            }
            let noise: Vec<u8> = u.arbitrary()?;
            for bytes in [bytes, noise] {
                if let Ok(text) = json(&bytes) {
                    assert!(!text.contains("\n"), "{text}");
                }
            }
            Ok(())
        })
        .budget_ms(200);
    }
}
