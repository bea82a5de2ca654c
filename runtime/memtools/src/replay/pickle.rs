//! A reader of Python's pickles: only plain data, and in time and memory that are a small multiple
//! of the file's.
//!
//! A pickle is a program for a stack machine ("pickletools" in Python's library documents its
//! opcodes). Readers that build trees as they go can be made to build exponentially large ones, by
//! values that are shared and shared again, or deep ones that overflow the stack when they are
//! visited. Here each value is a row of a table, values name others by their rows, and no opcode
//! makes more than a few rows; nothing recurses. Opcodes that call Python are refused.

/// A row of [`Data`].
pub(super) type Id = u32;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// `None`, a float, bytes: values that no reader needs.
    Other,
    /// A whole number; `None` if it is beyond 64 bits.
    Int(Option<i64>),
    /// Text, as it stands in the file.
    Text(std::ops::Range<usize>),
    /// A list or a tuple.
    List(Vec<Id>),
    /// Keys and values in turn.
    Dict(Vec<Id>),
    /// A mark on the machine's stack.
    Mark,
}

/// All values of a pickle.
#[derive(Debug)]
pub(super) struct Data<'a> {
    bytes: &'a [u8],
    values: Vec<Value>,
}

impl<'a> Data<'a> {
    /// Reads a pickle: its values, and the id of the root.
    ///
    /// # Errors
    /// The byte at which it is not a pickle, or not one of plain data.
    pub fn read(bytes: &'a [u8]) -> Result<(Data<'a>, Id), String> {
        let mut machine = Machine {
            data: Data {
                bytes,
                values: Vec::new(),
            },
            at: 0,
            stack: Vec::new(),
            memo: Vec::new(),
        };
        loop {
            let at = machine.at;
            match machine.step() {
                None => return Err(format!("byte {at}: no pickle of plain data continues so")),
                Some(Some(value)) => return Ok((machine.data, value)),
                Some(None) => {}
            }
        }
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// The elements of a list or tuple; of anything else, none.
    pub fn list(&self, id: Id) -> &[Id] {
        match &self.values[id as usize] {
            Value::List(all) => all,
            _ => &[],
        }
    }

    /// A text.
    pub fn text(&self, id: Id) -> Option<&str> {
        match &self.values[id as usize] {
            Value::Text(range) => str::from_utf8(&self.bytes[range.clone()]).ok(),
            _ => None,
        }
    }

    /// A whole number.
    pub fn int(&self, id: Id) -> Option<i64> {
        match &self.values[id as usize] {
            Value::Int(number) => *number,
            _ => None,
        }
    }

    /// The value of a dictionary under a name; the last, if there are several.
    pub fn field(&self, id: Id, name: &str) -> Option<Id> {
        let Value::Dict(pairs) = &self.values[id as usize] else {
            return None;
        };
        pairs
            .chunks_exact(2)
            .rev()
            .find(|pair| self.text(pair[0]) == Some(name))
            .map(|pair| pair[1])
    }
}

struct Machine<'a> {
    data: Data<'a>,
    at: usize,
    stack: Vec<Id>,
    memo: Vec<Option<Id>>,
}

impl Machine<'_> {
    fn take(&mut self, bytes: usize) -> Option<&[u8]> {
        let end = self.at.checked_add(bytes)?;
        let taken = self.data.bytes.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    /// A little-endian number of so many bytes, at most eight.
    fn number(&mut self, bytes: usize) -> Option<u64> {
        Some(
            self.take(bytes)?
                .iter()
                .rev()
                .fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
        )
    }

    /// A signed one, of any length; `None` beyond 64 bits.
    fn signed(&mut self, bytes: usize) -> Option<Value> {
        let all = self.take(bytes)?;
        let negative = all.last().is_some_and(|byte| byte & 0x80 != 0);
        let fill = if negative { 0xff } else { 0 };
        let mut eight = [fill; 8];
        let (low, high) = all.split_at(all.len().min(8));
        eight[..low.len()].copy_from_slice(low);
        let number = i64::from_le_bytes(eight);
        let fits = high.iter().all(|byte| *byte == fill) && (number < 0) == negative;
        Some(Value::Int(fits.then_some(number)))
    }

    fn push(&mut self, value: Value) -> Option<()> {
        let id = Id::try_from(self.data.values.len()).ok()?;
        self.data.values.push(value);
        self.stack.push(id);
        Some(())
    }

    fn pop(&mut self) -> Option<Id> {
        self.stack
            .pop()
            .filter(|id| self.data.values[*id as usize] != Value::Mark)
    }

    /// The items above the last mark, which goes too.
    fn above_mark(&mut self) -> Option<Vec<Id>> {
        let mark = self
            .stack
            .iter()
            .rposition(|id| self.data.values[*id as usize] == Value::Mark)?;
        let above = self.stack.split_off(mark + 1);
        self.stack.pop();
        Some(above)
    }

    fn append(&mut self, mut items: Vec<Id>, dict: bool) -> Option<()> {
        let into = *self.stack.last()?;
        match &mut self.data.values[into as usize] {
            Value::List(all) if !dict => all.append(&mut items),
            Value::Dict(all) if dict && items.len().is_multiple_of(2) => all.append(&mut items),
            _ => return None,
        }
        Some(())
    }

    fn text(&mut self, length: u64) -> Option<()> {
        let length = usize::try_from(length).ok()?;
        let start = self.at;
        str::from_utf8(self.take(length)?).ok()?;
        self.push(Value::Text(start..start + length))
    }

    fn skip(&mut self, length: u64) -> Option<()> {
        self.take(usize::try_from(length).ok()?)?;
        self.push(Value::Other)
    }

    fn line(&mut self) -> Option<&str> {
        let rest = self.data.bytes.get(self.at..)?;
        let length = rest.iter().position(|byte| *byte == b'\n')?;
        self.at += length + 1;
        str::from_utf8(&rest[..length]).ok()
    }

    fn tuple(&mut self, length: usize) -> Option<()> {
        let at = self.stack.len().checked_sub(length)?;
        let items = self.stack.split_off(at);
        let plain = items
            .iter()
            .all(|id| self.data.values[*id as usize] != Value::Mark);
        plain.then_some(())?;
        self.push(Value::List(items))
    }

    fn remember(&mut self, slot: u64) -> Option<()> {
        let slot = usize::try_from(slot).ok()?;
        let top = *self.stack.last()?;
        if slot >= self.memo.len() {
            // A writer numbers the items it remembers; a slot far beyond would only serve to make
            // the table large.
            (slot <= self.data.bytes.len()).then_some(())?;
            self.memo.resize(slot + 1, None);
        }
        self.memo[slot] = Some(top);
        Some(())
    }

    fn recall(&mut self, slot: u64) -> Option<()> {
        let id = *self.memo.get(usize::try_from(slot).ok()?)?;
        self.stack.push(id?);
        Some(())
    }

    /// One opcode. The value, once the pickle ends.
    fn step(&mut self) -> Option<Option<Id>> {
        let opcode = self.take(1)?[0];
        match opcode {
            b'.' => return Some(Some(self.pop()?)),
            // PROTO, FRAME
            0x80 => drop(self.take(1)?),
            0x95 => drop(self.take(8)?),
            b'(' => self.push(Value::Mark)?,
            b'0' => drop(self.stack.pop()?),
            b'1' => drop(self.above_mark()?),
            b'2' => {
                let top = *self.stack.last()?;
                self.stack.push(top);
            }
            b'N' | 0x88 | 0x89 => self.push(Value::Other)?,
            b'F' => {
                self.line()?;
                self.push(Value::Other)?;
            }
            b'G' => self.skip(8)?,
            b'I' | b'L' => {
                let line = self.line()?;
                let digits = line.strip_suffix('L').unwrap_or(line);
                digits
                    .strip_prefix('-')
                    .unwrap_or(digits)
                    .bytes()
                    .all(|b| b.is_ascii_digit())
                    .then_some(())?;
                let number = digits.parse().ok();
                self.push(Value::Int(number))?;
            }
            b'J' => {
                let number = self.signed(4)?;
                self.push(number)?;
            }
            b'K' | b'M' => {
                let number = self.number(if opcode == b'K' { 1 } else { 2 })?;
                self.push(Value::Int(i64::try_from(number).ok()))?;
            }
            0x8a | 0x8b => {
                let length = self.number(if opcode == 0x8a { 1 } else { 4 })?;
                let number = self.signed(usize::try_from(length).ok()?)?;
                self.push(number)?;
            }
            b'V' => {
                let start = self.at;
                let length = self.line()?.len();
                self.push(Value::Text(start..start + length))?;
            }
            // Texts, with lengths of 1, 4 and 8 bytes, then bytes.
            0x8c | b'X' | 0x8d => {
                let length = self.number(match opcode {
                    0x8c => 1,
                    b'X' => 4,
                    _ => 8,
                })?;
                self.text(length)?;
            }
            b'C' | b'B' | 0x8e | b'U' | b'T' => {
                let length = self.number(match opcode {
                    b'C' | b'U' => 1,
                    b'B' | b'T' => 4,
                    _ => 8,
                })?;
                self.skip(length)?;
            }
            b']' | b')' => self.push(Value::List(Vec::new()))?,
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b'l' | b't' => {
                let items = self.above_mark()?;
                self.push(Value::List(items))?;
            }
            b'd' => {
                let items = self
                    .above_mark()
                    .filter(|items| items.len().is_multiple_of(2))?;
                self.push(Value::Dict(items))?;
            }
            0x85..=0x87 => self.tuple(usize::from(opcode - 0x84))?,
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item], false)?;
            }
            b'e' => {
                let items = self.above_mark()?;
                self.append(items, false)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.append(vec![key, value], true)?;
            }
            b'u' => {
                let items = self.above_mark()?;
                self.append(items, true)?;
            }
            b'q' | b'r' => {
                let slot = self.number(if opcode == b'q' { 1 } else { 4 })?;
                self.remember(slot)?;
            }
            b'p' => {
                let slot = self.line()?.parse().ok()?;
                self.remember(slot)?;
            }
            0x94 => self.remember(self.memo.len() as u64)?,
            b'h' | b'j' => {
                let slot = self.number(if opcode == b'h' { 1 } else { 4 })?;
                self.recall(slot)?;
            }
            b'g' => {
                let slot = self.line()?.parse().ok()?;
                self.recall(slot)?;
            }
            _ => return None,
        }
        Some(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_data_of_every_protocol_is_read() {
        // pickle.dumps({"a": [1, 300, -5, 2**40, 2**70], "b": (None, 1.5, "z")}, protocol) of
        // CPython 3.
        let dumps: [&[u8]; 3] = [
            b"(dp0\nVa\np1\n(lp2\nI1\naI300\naI-5\naL1099511627776L\naL1180591620717411303424L\nasVb\np3\n(NF1.5\nVz\np4\ntp5\ns.",
            b"\x80\x02}q\x00(X\x01\x00\x00\x00aq\x01]q\x02(K\x01M,\x01J\xfb\xff\xff\xff\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00@eX\x01\x00\x00\x00bq\x03NG?\xf8\x00\x00\x00\x00\x00\x00X\x01\x00\x00\x00zq\x04\x87q\x05u.",
            b"\x80\x04\x95>\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x01a\x94]\x94(K\x01M,\x01J\xfb\xff\xff\xff\x8a\x06\x00\x00\x00\x00\x00\x01\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00@e\x8c\x01b\x94NG?\xf8\x00\x00\x00\x00\x00\x00\x8c\x01z\x94\x87\x94u.",
        ];
        for dump in dumps {
            let (data, root) = Data::read(dump).expect("a pickle");
            let a = data.field(root, "a").expect("a field");
            let numbers: Vec<Option<i64>> = data.list(a).iter().map(|id| data.int(*id)).collect();
            assert_eq!(numbers, [Some(1), Some(300), Some(-5), Some(1 << 40), None]);
            let b = data.field(root, "b").expect("a field");
            assert_eq!(data.list(b).last().and_then(|id| data.text(*id)), Some("z"));
            assert_eq!(data.field(root, "c"), None);
        }
    }

    #[test]
    fn what_would_explode_elsewhere_stays_small() {
        // Sharing: each tuple holds the one before twice.
        let mut bomb = vec![b']'];
        bomb.extend([b'2', 0x86].repeat(1000));
        bomb.push(b'.');
        let (data, _) = Data::read(&bomb).expect("plain data");
        assert_eq!(data.values.len(), 1001);
        // Depth: dropped without recursion.
        let mut deep = vec![b']'];
        deep.extend([0x85].repeat(1_000_000));
        deep.push(b'.');
        assert!(Data::read(&deep).is_ok());
        assert!(
            Data::read(b"]r\xff\xff\xff\xff.").is_err(),
            "a slot far beyond the file"
        );
        assert!(
            Data::read(b"X\xff\xff\xff\xffabc.").is_err(),
            "a text far beyond the file"
        );
        assert!(
            Data::read(b"cos\nsystem\n(S'true'\ntR.").is_err(),
            "calls are refused"
        );
    }

    #[test]
    fn damaged_pickles_are_refused_and_nothing_panics() {
        let whole = b"\x80\x02}q\0(X\x01\0\0\0aq\x01]q\x02(K\x01M,\x01eu.";
        assert!(Data::read(whole).is_ok());
        for length in 0..whole.len() {
            assert!(
                Data::read(&whole[..length]).is_err(),
                "cut to {length} bytes"
            );
        }
        arbtest::arbtest(|u| {
            let mut bytes = whole.to_vec();
            for _ in 0..u.int_in_range(1..=4)? {
                let at = u.choose_index(bytes.len())?;
                bytes[at] = u.arbitrary()?;
            }
            let _ = Data::read(&bytes);
            let noise: Vec<u8> = u.arbitrary()?;
            let _ = Data::read(&noise);
            Ok(())
        })
        .budget_ms(200);
    }
}
