//! Packing problems and their solutions as text: `id,lower,upper,size`, half-open, with optional `alignment` and `offset`.
//!
//! One header line names the columns, in any order; then one line per item, in any order. Ids are opaque and unique; one
//! that contains a comma, a quote or a line break is quoted as in RFC 4180. The four columns are those of the public
//! MiniMalloc benchmark.

use crate::dag::Dag;
use crate::liveness::Lifetime;
use crate::pack::{Item, Packing, Problem};
use crate::plan::{Layout, Plan};
use std::collections::{HashMap, HashSet};

/// One line of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What the file calls it.
    pub id: String,
    /// Lifetime, size and alignment (1 if the file has no such column).
    pub item: Item,
    /// Where it lies, if the file says so.
    pub offset: Option<u64>,
}

/// Why a text is no packing problem. Lines count from 1, the header included.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CsvError {
    /// There is no header line.
    #[error("line 1: the header `id,lower,upper,size` is missing")]
    NoHeader,
    /// The header lacks a column.
    #[error("line 1: the header lacks the column `{0}`")]
    MissingColumn(&'static str),
    /// The header has a column that is not understood, or one twice.
    #[error("line 1: column `{0}` is unknown or appears twice; there are id, lower, upper, size, alignment, offset")]
    BadColumn(String),
    /// A quoted field does not end, or something follows its end.
    #[error("line {line}: a quoted field is not closed properly")]
    Quote {
        /// The line.
        line: usize,
    },
    /// A line has not one field per column.
    #[error("line {line}: {found} fields, the header has {expected}")]
    Fields {
        /// The line.
        line: usize,
        /// How many columns there are.
        expected: usize,
        /// How many fields the line has.
        found: usize,
    },
    /// A field is no whole number, or one beyond 64 bits.
    #[error("line {line}: {column} `{text}` is not a whole number from 0 to 2^64-1")]
    Number {
        /// The line.
        line: usize,
        /// The column.
        column: &'static str,
        /// The field.
        text: String,
    },
    /// A lifetime ends before it has begun.
    #[error("line {line}: upper {upper} is not above lower {lower}")]
    Lifetime {
        /// The line.
        line: usize,
        /// Where the lifetime starts.
        lower: u64,
        /// Where it ends.
        upper: u64,
    },
    /// An alignment is not a power of two.
    #[error("line {line}: alignment {align} is no power of two")]
    Alignment {
        /// The line.
        line: usize,
        /// The alignment.
        align: u64,
    },
    /// A solution reaches beyond 64 bits.
    #[error("line {line}: offset {offset} and size {size} together exceed 64 bits")]
    End {
        /// The line.
        line: usize,
        /// The offset.
        offset: u64,
        /// The size.
        size: u64,
    },
    /// Two lines have one id.
    #[error("line {line}: id `{id}` already stands on line {first}")]
    Duplicate {
        /// The second line.
        line: usize,
        /// The first line.
        first: usize,
        /// The id.
        id: String,
    },
}

const COLUMNS: [&str; 6] = ["id", "lower", "upper", "size", "alignment", "offset"];
const REQUIRED: usize = 4;

/// Reads rows from text.
pub fn read(text: &str) -> Result<Vec<Row>, CsvError> {
    let mut records = Records { rest: text.strip_prefix('\u{feff}').unwrap_or(text), line: 1 };
    let (_, header) = records.next().ok_or(CsvError::NoHeader)??;
    let mut column_at: [Option<usize>; COLUMNS.len()] = [None; COLUMNS.len()];
    for (at, name) in header.iter().enumerate() {
        let slot = COLUMNS.iter().position(|column| *column == name.trim()).map(|column| &mut column_at[column]);
        match slot {
            Some(slot @ None) => *slot = Some(at),
            _ => return Err(CsvError::BadColumn(name.trim().into())),
        }
    }
    if let Some(missing) = (0..REQUIRED).find(|&column| column_at[column].is_none()) {
        return Err(CsvError::MissingColumn(COLUMNS[missing]));
    }
    let mut rows = Vec::new();
    let mut line_of: HashMap<String, usize> = HashMap::new();
    for record in records {
        let (line, fields) = record?;
        if fields.len() != header.len() {
            return Err(CsvError::Fields { line, expected: header.len(), found: fields.len() });
        }
        let row = row(line, &fields, &column_at)?;
        if let Some(first) = line_of.insert(row.id.clone(), line) {
            return Err(CsvError::Duplicate { line, first, id: row.id });
        }
        rows.push(row);
    }
    Ok(rows)
}

fn row(line: usize, fields: &[String], column_at: &[Option<usize>; COLUMNS.len()]) -> Result<Row, CsvError> {
    let number = |column: usize| -> Result<Option<u64>, CsvError> {
        let Some(at) = column_at[column] else { return Ok(None) };
        let text = fields[at].trim();
        let bad = || CsvError::Number { line, column: COLUMNS[column], text: text.into() };
        // `parse` would let a plus sign pass.
        text.bytes().all(|c| c.is_ascii_digit()).then(|| text.parse().ok()).flatten().ok_or_else(bad).map(Some)
    };
    let (lower, upper, size) = (number(1)?.unwrap_or(0), number(2)?.unwrap_or(0), number(3)?.unwrap_or(0));
    let (align, offset) = (number(4)?.unwrap_or(1), number(5)?);
    if upper <= lower {
        return Err(CsvError::Lifetime { line, lower, upper });
    }
    if !align.is_power_of_two() {
        return Err(CsvError::Alignment { line, align });
    }
    if let Some(offset) = offset.filter(|offset| offset.checked_add(size).is_none()) {
        return Err(CsvError::End { line, offset, size });
    }
    let id = column_at[0].map(|at| fields[at].clone()).unwrap_or_default();
    Ok(Row { id, item: Item { life: Lifetime::new(lower, upper), size, align }, offset })
}

/// Lines of fields, with the number of the line each begins on; blank lines are skipped.
struct Records<'a> {
    rest: &'a str,
    line: usize,
}

impl Iterator for Records<'_> {
    type Item = Result<(usize, Vec<String>), CsvError>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(rest) = self.rest.strip_prefix("\r\n").or_else(|| self.rest.strip_prefix('\n')) {
            self.rest = rest;
            self.line += 1;
        }
        let line = self.line;
        let mut fields = Vec::new();
        while !self.rest.is_empty() {
            match self.field() {
                Some(field) => fields.push(field),
                None => {
                    self.rest = "";
                    return Some(Err(CsvError::Quote { line }));
                }
            }
            if let Some(rest) = self.rest.strip_prefix(',') {
                self.rest = rest;
                if rest.is_empty() {
                    fields.push(String::new());
                }
                continue;
            }
            break;
        }
        (!fields.is_empty()).then_some(Ok((line, fields)))
    }
}

impl Records<'_> {
    /// The field that begins here; what is left begins with the comma or line break after it. None: bad quotes.
    fn field(&mut self) -> Option<String> {
        let Some(mut rest) = self.rest.strip_prefix('"') else {
            let end = self.rest.find([',', '\n']).unwrap_or(self.rest.len());
            let (field, rest) = self.rest.split_at(end);
            self.rest = rest;
            return Some(field.strip_suffix('\r').unwrap_or(field).into());
        };
        let mut field = String::new();
        loop {
            let end = rest.find('"')?;
            field.push_str(&rest[..end]);
            rest = &rest[end + 1..];
            match rest.strip_prefix('"') {
                Some(after) => {
                    field.push('"');
                    rest = after;
                }
                None => break,
            }
        }
        self.line += field.matches('\n').count();
        let rest = rest.strip_prefix('\r').unwrap_or(rest);
        self.rest = rest;
        (rest.is_empty() || rest.starts_with([',', '\n'])).then_some(field)
    }
}

/// Writes rows as text. The columns `alignment` and `offset` appear if any row needs them; a row without an offset then
/// gets 0.
pub fn write(rows: &[Row]) -> String {
    let aligned = rows.iter().any(|row| row.item.align != 1);
    let solved = rows.iter().any(|row| row.offset.is_some());
    let mut text = COLUMNS[..REQUIRED].join(",");
    text += if aligned { ",alignment" } else { "" };
    text += if solved { ",offset\n" } else { "\n" };
    for row in rows {
        let Lifetime { start, end } = row.item.life;
        text += &format!("{},{start},{end},{}", quoted(&row.id), row.item.size);
        if aligned {
            text += &format!(",{}", row.item.align);
        }
        if solved {
            text += &format!(",{}", row.offset.unwrap_or(0));
        }
        text.push('\n');
    }
    text
}

fn quoted(id: &str) -> String {
    if id.is_empty() || id.contains([',', '"', '\n', '\r']) { format!("\"{}\"", id.replace('"', "\"\"")) } else { id.into() }
}

/// The problem that rows pose.
pub fn problem(rows: &[Row]) -> Problem {
    Problem::new(rows.iter().map(|row| row.item).collect())
}

/// Writes the offsets of a packing into the rows of its problem.
///
/// # Panics
/// If the packing is not that of [`problem`] for these rows.
pub fn set_offsets(rows: &mut [Row], packing: &Packing) {
    assert_eq!(rows.len(), packing.offsets.len(), "a packing of as many items as there are rows");
    rows.iter_mut().zip(&packing.offsets).for_each(|(row, &offset)| row.offset = Some(offset));
}

/// The packing problem inside a plan with its solution: one row per rectangle, so buffers that are computed in place share
/// a row with those whose bytes they take, and workspaces have rows named after their tasks. A name that appears twice is
/// told apart by its id.
pub fn of_plan(dag: &Dag, plan: &Plan) -> Vec<Row> {
    let layout = Layout::new(dag, &plan.order, &plan.lifetimes, &plan.reused);
    let mut rows: Vec<Row> = layout.problem.items.iter().map(|&item| Row { id: String::new(), item, offset: None }).collect();
    let mut names = HashSet::new();
    let mut name = |row: &mut Row, mut name: String, id: String, offset: u64| {
        if row.offset.is_none() {
            while !names.insert(name.clone()) {
                name = format!("{name}#{id}");
            }
            (row.id, row.offset) = (name, Some(offset));
        }
    };
    for (i, item) in layout.item_of_buffer.iter().enumerate().filter_map(|(i, item)| Some((i, (*item)?))) {
        name(&mut rows[item as usize], dag.buffers[i].name.clone(), i.to_string(), plan.offsets[i]);
    }
    for (i, item) in layout.item_of_workspace.iter().enumerate().filter_map(|(i, item)| Some((i, (*item)?))) {
        name(&mut rows[item as usize], format!("{}.workspace", dag.tasks[i].name), format!("t{i}"), plan.workspace_offsets[i]);
    }
    rows
}

#[cfg(test)]
mod tests;
