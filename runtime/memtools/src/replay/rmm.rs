//! The log of the RAPIDS memory manager's `logging_resource_adaptor`.

use slabwise_planner::brief;

use super::Trace;
use super::events::{Before, Logged, trace};

/// The columns that are read; the log has `Thread` and `Time` as well.
const COLUMNS: [&str; 4] = ["Action", "Pointer", "Size", "Stream"];

/// Whether a text begins like a log.
pub(super) fn is_log(text: &str) -> bool {
    let mut columns = text
        .lines()
        .next()
        .unwrap_or_default()
        .split(',')
        .map(str::trim);
    COLUMNS
        .iter()
        .all(|name| columns.clone().any(|c| c == *name))
        && columns.next().is_some()
}

impl Trace {
    /// Reads a log in RMM's CSV format, `Thread,Time,Action,Pointer,Size,Stream`, with the actions
    /// `allocate`, `free` and `allocate failure` (which is passed over). Threads are replayed in
    /// the order of the log.
    ///
    /// # Errors
    /// The line of the defect, and its kind.
    pub fn of_rmm(text: &str) -> Result<Trace, String> {
        let mut lines = text
            .lines()
            .enumerate()
            .map(|(at, line)| (at + 1, line.trim()))
            .filter(|(_, line)| !line.is_empty());
        let header: Vec<&str> = lines.next().map_or(Vec::new(), |(_, line)| {
            line.split(',').map(str::trim).collect()
        });
        let mut column = [0; 4];
        for (at, name) in column.iter_mut().zip(COLUMNS) {
            *at = header
                .iter()
                .position(|h| *h == name)
                .ok_or_else(|| format!("line 1: the header lacks the column `{name}`"))?;
        }
        let (mut log, mut line_of) = (Vec::new(), Vec::new());
        for (number, line) in lines {
            let wrong = |what: String| format!("line {number}: {what}");
            let fields: Vec<&str> = line.split(',').map(str::trim).collect();
            if fields.len() != header.len() {
                return Err(wrong(format!(
                    "{} fields, the header has {}",
                    fields.len(),
                    header.len()
                )));
            }
            let [action, pointer, size, stream] = column.map(|at| fields[at]);
            let hex = |name: &str, text: &str| {
                let digits = text.strip_prefix("0x").unwrap_or(text);
                // `%p` of a null pointer.
                if text == "(nil)" {
                    Ok(0)
                } else {
                    u64::from_str_radix(digits, 16)
                        .map_err(|_| wrong(format!("{name} `{}` is not an address", brief(text))))
                }
            };
            let bytes = || {
                size.parse::<u64>().map_err(|_| {
                    wrong(format!(
                        "Size `{}` is not a whole number from 0 to 2^64-1",
                        brief(size)
                    ))
                })
            };
            log.push(match action {
                "allocate" => Logged::Alloc {
                    address: hex("Pointer", pointer)?,
                    bytes: bytes()?,
                    stream: hex("Stream", stream)?,
                },
                "free" => Logged::Free {
                    address: hex("Pointer", pointer)?,
                    bytes: bytes()?,
                },
                "allocate failure" => continue,
                _ => {
                    return Err(wrong(format!(
                        "Action `{}` is none of allocate, free, allocate failure",
                        brief(action)
                    )));
                }
            });
            line_of.push(number);
        }
        trace(&log, Before::Nothing, &[]).map_err(|(at, what)| match line_of.get(at) {
            Some(number) => format!("line {number}: {what}"),
            None => what,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Op;
    use super::*;
    use slabwise_pool::Stream;

    const HEAD: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

    #[test]
    fn a_log_is_read() {
        let text = format!(
            "{HEAD}140202544379712,11:16:02:513512,allocate,0x7f837c000000,256,0x0\n\
             140202544379712,11:16:02:513525,allocate failure,(nil),99999999999,0x0\n\
             140202544379712,11:16:02:513536,allocate,0x7f837c000100,1000,0x55d0b2f8\r\n\n\
             140202544379712,11:16:02:513547,free,0x7f837c000000,256,0x0\n"
        );
        assert!(is_log(&text));
        let trace = Trace::of_rmm(&text).expect("a log");
        let on = |bytes, stream| Op::Alloc {
            bytes,
            stream: Stream(stream),
        };
        assert_eq!(trace.ops(), [on(256, 0), on(1000, 1), Op::Free(0)]);
        assert_eq!(trace.peak_live_bytes(), 1256);
    }

    #[test]
    fn wrong_lines_are_named() {
        let wrong = |lines: &str, says: &str| {
            let error = Trace::of_rmm(&format!("{HEAD}{lines}")).expect_err(lines);
            assert!(error.contains(says), "{error}");
        };
        wrong("1,t,allocate,0x1,8\n", "line 2: 5 fields");
        wrong(
            "1,t,allocate,0x1,8,0x0\n1,t,allocate,0xg,8,0x0\n",
            "line 3: Pointer `0xg`",
        );
        wrong("1,t,allocate,0x1,-8,0x0\n", "line 2: Size `-8`");
        wrong("1,t,allocate,0x1,8,main\n", "line 2: Stream `main`");
        wrong("1,t,realloc,0x1,8,0x0\n", "line 2: Action `realloc`");
        wrong(
            "1,t,allocate,0x1,8,0x0\n\n1,t,free,0x2,8,0x0\n",
            "line 4: 0x2 is freed",
        );
        wrong(
            "1,t,allocate,0x1,18446744073709551615,0x0\n",
            "line 2: more bytes",
        );
        assert!(Trace::of_rmm("").is_err_and(|e| e.contains("`Action`")));
        assert!(!is_log("id,lower,upper,size\n"));
    }
}
