//! Traces in files, gzipped or not, in any of the known formats.

use std::path::Path;

use slabwise_planner::csv::{self, FileError};

use super::{Trace, rmm};

/// The most bytes of a trace, unpacked: enough for some ten million operations, and a bound for the
/// unpacked size of a small file. A pickle may have a quarter of it.
pub const FILE_MAX: u64 = 1 << 29;

/// Why a file is not a trace.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It could not be read, or is longer than [`FILE_MAX`] bytes.
    #[error(transparent)]
    File(#[from] FileError),
    /// It has none of the known formats, or breaks the rules of its format.
    #[error("{}: {message}", path.display())]
    Format {
        /// Which file.
        path: std::path::PathBuf,
        /// The defect, and its place.
        message: String,
    },
}

impl Trace {
    /// Reads a trace: RMM's log (`Thread,Time,Action,Pointer,Size,Stream`), a memory snapshot of
    /// PyTorch (pickle or JSON), or lifetimes (`id,lower,upper,size`); the content identifies the
    /// format.
    ///
    /// # Errors
    /// If the file cannot be read, is too long, or is none of these; malformed ones name the place.
    pub fn read_file(path: &Path) -> Result<Trace, TraceError> {
        let bytes = csv::read_packed(path, FILE_MAX)?;
        Trace::of_bytes(&bytes).map_err(|message| TraceError::Format {
            path: path.into(),
            message,
        })
    }

    /// Reads a file's contents; see [`Trace::read_file`].
    ///
    /// # Errors
    /// The place of the defect, and its kind.
    pub fn of_bytes(bytes: &[u8]) -> Result<Trace, String> {
        // The first opcode of a pickle of any protocol above 1; in older protocols, that of a
        // dictionary.
        if bytes.first() == Some(&0x80) || bytes.starts_with(b"(d") || bytes.starts_with(b"}q") {
            return Trace::of_snapshot_pickle(bytes);
        }
        let text = str::from_utf8(bytes).map_err(|error| {
            let line = 1 + bytes[..error.valid_up_to()]
                .iter()
                .filter(|&&byte| byte == b'\n')
                .count();
            format!("line {line} is not UTF-8, and the file is not a pickle")
        })?;
        if text.trim_start().starts_with('{') {
            return Trace::of_snapshot_json(text);
        }
        if rmm::is_log(text) {
            return Trace::of_rmm(text);
        }
        Trace::of_lifetimes(&csv::read(text).map_err(|error| {
            format!("{error} (read as lifetimes: it is neither a log of RMM, which begins with Thread,Time,Action, nor a snapshot)")
        })?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Op;
    use super::*;

    #[test]
    fn formats_are_detected() {
        let bytes_of = |file: &[u8]| Trace::of_bytes(file).map(|t| t.peak_live_bytes());
        assert_eq!(
            bytes_of(b"id,lower,upper,size\na,0,2,10\nb,1,3,5\nc,2,4,10\n"),
            Ok(15)
        );
        assert_eq!(
            bytes_of(b"Thread,Time,Action,Pointer,Size,Stream\n1,0,allocate,0x10,7,0x0\n"),
            Ok(7)
        );
        let json = r#"{"segments": [], "device_traces": [[{"action": "alloc", "addr": 16, "size": 9, "stream": 0}]]}"#;
        assert_eq!(bytes_of(json.as_bytes()), Ok(9));
        for wrong in [
            &b""[..],
            b"hello",
            b"\xff\xfe",
            b"{",
            b"\x80\x04.",
            b"id,lower\n",
        ] {
            assert!(bytes_of(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn lifetimes_end_before_others_begin() {
        let trace =
            Trace::of_bytes(b"id,lower,upper,size\n2,0,2,20\n1,0,2,10\n3,2,3,30\n4,1,1,99\n")
                .expect("lifetimes");
        let sizes: Vec<u64> = trace
            .ops()
            .iter()
            .filter_map(|op| {
                if let Op::Alloc { bytes, .. } = op {
                    Some(*bytes)
                } else {
                    None
                }
            })
            .collect();
        assert_eq!(
            sizes,
            [10, 20, 30],
            "in the order of ids, without those that never live"
        );
        assert_eq!(trace.peak_live_bytes(), 30);
    }

    #[test]
    fn any_bytes_are_a_trace_or_an_error() {
        let corpus: [&[u8]; 4] = [
            b"Thread,Time,Action,Pointer,Size,Stream\n1,0,allocate,0x10,7,0x0\n1,0,free,0x10,7,0x0\n",
            b"id,lower,upper,size\na,0,2,10\nb,1,3,5\n",
            br#"{"segments": [{"device":0,"blocks":[{"state":"active_allocated","address":1,"size":2}]}], "device_traces": [[{"action": "free_completed", "addr": 16, "size": 9}]]}"#,
            b"\x80\x02}X\x0d\0\0\0device_traces](](}(X\x06\0\0\0actionX\x05\0\0\0allocX\x04\0\0\0addrK\x01X\x04\0\0\0sizeK\x09uees.",
        ];
        for file in corpus {
            assert!(Trace::of_bytes(file).is_ok(), "{:?}", Trace::of_bytes(file));
        }
        arbtest::arbtest(|u| {
            let mut bytes = u.choose(&corpus)?.to_vec();
            for _ in 0..u.int_in_range(1..=4)? {
                let at = u.choose_index(bytes.len())?;
                match u.int_in_range(0..=2)? {
                    0 => bytes[at] = u.arbitrary()?,
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, u.arbitrary()?),
                }
            }
            if let Ok(trace) = Trace::of_bytes(&bytes) {
                assert!(trace.ops().len() <= bytes.len());
            }
            Ok(())
        })
        .budget_ms(300);
    }
}
