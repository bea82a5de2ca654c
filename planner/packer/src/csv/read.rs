//! The parser of tables: from text to a table.

use super::{
    ALIAS, ALIGNMENT, COLUMNS, CsvError, FIXED, FOLLOWS, GAPS, ID, IN_PLACE, Ids, LOWER, OFFSET,
    REQUIRED, SIZE, SPACE, Table, UPPER,
};
use crate::lifetime::Lifetime;
use crate::problem::{Gap, InPlace, Item, Placement, Problem, Space, Window};
use rustc_hash::{FxHashMap, FxHashSet};
use std::borrow::Cow;
use std::collections::HashMap;

/// Reads a table from text.
pub fn read(text: &str) -> Result<Table, CsvError> {
    let mut records = Records {
        rest: text.strip_prefix('\u{feff}').unwrap_or(text),
        line: 1,
    };
    let mut fields = Vec::new();
    records.next(&mut fields)?.ok_or(CsvError::NoHeader)?;
    let mut column_at: [Option<usize>; COLUMNS.len()] = [None; COLUMNS.len()];
    for (at, name) in fields.iter().enumerate() {
        let slot = COLUMNS
            .iter()
            .position(|column| *column == name.trim())
            .map(|column| &mut column_at[column]);
        match slot {
            Some(slot @ None) => *slot = Some(at),
            _ => return Err(CsvError::BadColumn(name.trim().into())),
        }
    }
    if let Some(missing) = (0..REQUIRED).find(|&column| column_at[column].is_none()) {
        return Err(CsvError::MissingColumn(COLUMNS[missing]));
    }
    let expected = fields.len();
    let mut reader = Reader {
        column_at,
        ..Reader::default()
    };
    while let Some(line) = records.next(&mut fields)? {
        if fields.len() != expected {
            return Err(CsvError::Fields {
                line,
                expected,
                found: fields.len(),
            });
        }
        reader.row(line, &fields)?;
    }
    reader.finish()
}

/// Names in the order of their first appearance.
#[derive(Default)]
struct Groups {
    index: HashMap<String, usize>,
    names: Vec<String>,
    members: Vec<Vec<usize>>,
}

impl Groups {
    fn add(&mut self, name: &str, item: usize) {
        let next = self.names.len();
        let index = self.index.get(name).copied().unwrap_or(next);
        if index == next {
            self.index.insert(name.into(), next);
            self.names.push(name.into());
            self.members.push(Vec::new());
        }
        self.members[index].push(item);
    }
}

#[derive(Default)]
struct Reader {
    column_at: [Option<usize>; COLUMNS.len()],
    ids: Ids,
    /// The line of each item.
    lines: Vec<u32>,
    problem: Problem,
    aliases: Groups,
    spaces: Groups,
    /// References between items: the item, and the id of the other.
    follows: Vec<(usize, String)>,
    givers: Vec<(usize, String)>,
}

impl Reader {
    fn field<'f>(&self, column: usize, fields: &'f [Cow<str>]) -> Option<&'f str> {
        self.column_at[column].map(|at| &*fields[at])
    }

    /// A number from an optional field.
    fn number(
        &self,
        line: usize,
        column: usize,
        fields: &[Cow<str>],
    ) -> Result<Option<u64>, CsvError> {
        let Some(text) = self
            .field(column, fields)
            .map(str::trim)
            .filter(|text| !text.is_empty())
        else {
            return Ok(None);
        };
        whole(text).map(Some).ok_or_else(|| CsvError::Number {
            line,
            column: COLUMNS[column],
            text: text.into(),
        })
    }

    fn required(&self, line: usize, column: usize, fields: &[Cow<str>]) -> Result<u64, CsvError> {
        let number = self.number(line, column, fields)?;
        number.ok_or_else(|| CsvError::Number {
            line,
            column: COLUMNS[column],
            text: String::new(),
        })
    }

    fn row(&mut self, line: usize, fields: &[Cow<str>]) -> Result<(), CsvError> {
        let (lower, upper) = (
            self.required(line, LOWER, fields)?,
            self.required(line, UPPER, fields)?,
        );
        let size = self.required(line, SIZE, fields)?;
        let align = self.number(line, ALIGNMENT, fields)?.unwrap_or(1);
        if upper < lower {
            return Err(CsvError::Lifetime { line, lower, upper });
        }
        if !align.is_power_of_two() {
            return Err(CsvError::Alignment { line, align });
        }
        let item = self.problem.items.len();
        let counted = u32::try_from(line)
            .ok()
            .filter(|_| item < u32::MAX as usize)
            .ok_or(CsvError::TooMany { line })?;
        for column in [FIXED, OFFSET] {
            if let Some(offset) = self.number(line, column, fields)? {
                if offset.checked_add(size).is_none() {
                    return Err(CsvError::End {
                        line,
                        column: COLUMNS[column],
                        offset,
                        size,
                    });
                }
                let list = if column == FIXED {
                    &mut self.problem.fixed
                } else {
                    &mut self.problem.start
                };
                list.push(Placement { item, offset });
            }
        }
        for text in self
            .field(GAPS, fields)
            .unwrap_or_default()
            .split_whitespace()
        {
            let gap =
                gap(item, text).filter(|gap| gap.window.is_none_or(|window| window.high <= size));
            self.problem.gaps.push(gap.ok_or_else(|| CsvError::Gap {
                line,
                text: text.into(),
            })?);
        }
        if let Some(name) = self.field(ALIAS, fields).filter(|name| !name.is_empty()) {
            self.aliases.add(name, item);
        }
        if let Some(name) = self.field(SPACE, fields) {
            self.spaces.add(name, item);
        }
        if let Some(id) = self.field(FOLLOWS, fields).filter(|id| !id.is_empty()) {
            self.follows.push((item, id.into()));
        }
        if let Some(list) = self.field(IN_PLACE, fields) {
            self.givers
                .extend(listed(list).into_iter().map(|id| (item, id)));
        }
        self.ids.push(self.field(ID, fields).unwrap_or_default());
        self.lines.push(counted);
        self.problem.items.push(Item {
            life: Lifetime::new(lower, upper),
            size,
            align,
        });
        Ok(())
    }

    fn finish(mut self) -> Result<Table, CsvError> {
        let line = |item: usize| self.lines[item] as usize;
        let mut item_of: HashMap<&str, usize> = HashMap::with_capacity(self.lines.len());
        for item in 0..self.lines.len() {
            if let Some(first) = item_of.insert(self.ids.get(item), item) {
                return Err(CsvError::Duplicate {
                    line: line(item),
                    first: line(first),
                    id: self.ids.get(item).into(),
                });
            }
        }
        let find = |column: usize, (item, id): &(usize, String)| {
            let unknown = || CsvError::UnknownId {
                line: line(*item),
                column: COLUMNS[column],
                id: id.clone(),
            };
            item_of.get(id.as_str()).copied().ok_or_else(unknown)
        };
        for giver in &self.givers {
            self.problem.in_place.push(InPlace {
                from: find(IN_PLACE, giver)?,
                to: giver.0,
            });
        }
        let mut next: FxHashMap<usize, usize> = FxHashMap::default();
        let mut has_previous = vec![
            false;
            if self.follows.is_empty() {
                0
            } else {
                self.lines.len()
            }
        ];
        for follower in &self.follows {
            if next.insert(find(FOLLOWS, follower)?, follower.0).is_some() {
                return Err(CsvError::Follows {
                    line: line(follower.0),
                    id: follower.1.clone(),
                });
            }
            has_previous[follower.0] = true;
        }
        for first in (0..has_previous.len()).filter(|&item| !has_previous[item]) {
            let mut group = vec![first];
            while let Some(item) = group.last().and_then(|last| next.remove(last)) {
                group.push(item);
            }
            if group.len() > 1 {
                self.problem.contiguous.push(group);
            }
        }
        // The remaining items form cycles.
        let left: FxHashSet<usize> = next.into_values().collect();
        if let Some(follower) = self.follows.iter().find(|(item, _)| left.contains(item)) {
            return Err(CsvError::Follows {
                line: line(follower.0),
                id: follower.1.clone(),
            });
        }
        drop(item_of);
        self.problem.aliases = self.aliases.members;
        self.problem.spaces = self
            .spaces
            .members
            .into_iter()
            .map(|items| Space {
                capacity: None,
                items,
            })
            .collect();
        Ok(Table {
            problem: self.problem,
            spaces: self.spaces.names,
            ids: self.ids,
        })
    }
}

/// Digits only: `parse` alone would let a plus sign pass.
fn whole(text: &str) -> Option<u64> {
    text.bytes()
        .all(|c| c.is_ascii_digit())
        .then(|| text.parse().ok())
        .flatten()
}

/// `lower-upper` or `lower-upper@low:high`.
fn gap(item: usize, text: &str) -> Option<Gap> {
    let (life, window) = text
        .split_once('@')
        .map_or((text, None), |(life, window)| (life, Some(window)));
    let range = |text: &str, separator: char| {
        let (from, to) = text.split_once(separator)?;
        let (from, to) = (whole(from)?, whole(to)?);
        (!text.starts_with(separator) && !text.ends_with(separator) && from <= to)
            .then_some((from, to))
    };
    let (start, end) = range(life, '-')?;
    let window = match window {
        Some(window) => Some(range(window, ':').map(|(low, high)| Window { low, high })?),
        None => None,
    };
    Some(Gap {
        item,
        life: Lifetime::new(start, end),
        window,
    })
}

/// Ids separated by spaces; a backslash escapes the character after it.
fn listed(list: &str) -> Vec<String> {
    let mut ids = Vec::new();
    let mut id: Option<String> = None;
    let mut characters = list.chars();
    while let Some(c) = characters.next() {
        match c {
            c if c.is_whitespace() => ids.extend(id.take()),
            '\\' => id.get_or_insert_default().extend(characters.next()),
            c => id.get_or_insert_default().push(c),
        }
    }
    ids.extend(id);
    ids
}

/// Lines of fields.
struct Records<'a> {
    rest: &'a str,
    line: usize,
}

impl<'a> Records<'a> {
    /// Reads the next line that is not blank into `fields` and returns the number of the line it
    /// begins on.
    fn next(&mut self, fields: &mut Vec<Cow<'a, str>>) -> Result<Option<usize>, CsvError> {
        fields.clear();
        while let Some(rest) = self
            .rest
            .strip_prefix("\r\n")
            .or_else(|| self.rest.strip_prefix('\n'))
        {
            self.rest = rest;
            self.line += 1;
        }
        if self.rest.is_empty() {
            return Ok(None);
        }
        let line = self.line;
        loop {
            fields.push(self.field().ok_or(CsvError::Quote { line })?);
            match self.rest.strip_prefix(',') {
                Some(rest) => self.rest = rest,
                None => return Ok(Some(line)),
            }
        }
    }

    /// The field that begins here; the rest begins with the comma or line break after it. `None`:
    /// bad quotes.
    fn field(&mut self) -> Option<Cow<'a, str>> {
        let Some(mut rest) = self.rest.strip_prefix('"') else {
            let end = self
                .rest
                .bytes()
                .position(|byte| matches!(byte, b',' | b'\n'))
                .unwrap_or(self.rest.len());
            let (field, rest) = self.rest.split_at(end);
            self.rest = rest;
            // The first half of a line break, not part of a field that another one follows.
            let field = if rest.starts_with(',') {
                field
            } else {
                field.strip_suffix('\r').unwrap_or(field)
            };
            return Some(Cow::Borrowed(field));
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
        (rest.is_empty() || rest.starts_with([',', '\n'])).then_some(Cow::Owned(field))
    }
}
