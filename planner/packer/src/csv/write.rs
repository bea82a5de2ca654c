//! The writer of tables: from a table to text.

use super::{
    ALIAS, ALIGNMENT, COLUMNS, FIXED, FOLLOWS, GAPS, IN_PLACE, OFFSET, REQUIRED, SPACE, Table,
};
use rustc_hash::FxHashMap;
use std::fmt::Write;

/// Writes a table as text. A column that no item needs is left out. References to an item whose id
/// is empty cannot be written and are left out as well.
pub fn write(table: &Table) -> String {
    let problem = &table.problem;
    let mut extra: FxHashMap<(usize, usize), String> = FxHashMap::default();
    let mut note = |item: usize, column: usize, text: &dyn std::fmt::Display| {
        let field = extra.entry((item, column)).or_default();
        let space = if field.is_empty() { "" } else { " " };
        let _ = write!(field, "{space}{text}");
    };
    for at in &problem.fixed {
        note(at.item, FIXED, &at.offset);
    }
    for gap in &problem.gaps {
        let window = gap.window.map_or(String::new(), |window| {
            format!("@{}:{}", window.low, window.high)
        });
        note(
            gap.item,
            GAPS,
            &format_args!("{}-{}{window}", gap.life.start, gap.life.end),
        );
    }
    for (group, items) in problem.aliases.iter().enumerate() {
        items.iter().for_each(|&item| note(item, ALIAS, &group));
    }
    for two in problem.contiguous.iter().flat_map(|group| group.windows(2)) {
        note(two[1], FOLLOWS, &table.id(two[0]));
    }
    for pair in &problem.in_place {
        note(pair.to, IN_PLACE, &escaped(table.id(pair.from)));
    }
    let space_of = problem.space_of();
    let space = |index: usize| {
        table.spaces.get(index).cloned().unwrap_or_else(|| {
            if index == 0 {
                String::new()
            } else {
                index.to_string()
            }
        })
    };
    let mut offsets: Vec<Option<u64>> = vec![None; problem.items.len()];
    problem
        .start
        .iter()
        .for_each(|at| offsets[at.item] = Some(at.offset));

    let used = |column: usize| match column {
        0..REQUIRED => true,
        ALIGNMENT => problem.items.iter().any(|item| item.align != 1),
        FIXED => !problem.fixed.is_empty(),
        GAPS => !problem.gaps.is_empty(),
        ALIAS => problem.aliases.iter().any(|group| !group.is_empty()),
        FOLLOWS => problem.contiguous.iter().any(|group| group.len() > 1),
        IN_PLACE => !problem.in_place.is_empty(),
        SPACE => !problem.spaces.is_empty(),
        _ => !problem.start.is_empty(),
    };
    let columns: Vec<usize> = (0..COLUMNS.len()).filter(|&column| used(column)).collect();
    let names: Vec<&str> = columns.iter().map(|&column| COLUMNS[column]).collect();
    let mut text = names.join(",");
    text.push('\n');
    for (item, it) in problem.items.iter().enumerate() {
        quoted(&mut text, table.id(item));
        // Writing to a string does not fail.
        let _ = write!(text, ",{},{},{}", it.life.start, it.life.end, it.size);
        for &column in &columns[REQUIRED..] {
            text.push(',');
            match column {
                ALIGNMENT => _ = write!(text, "{}", it.align),
                OFFSET => offsets[item]
                    .iter()
                    .for_each(|offset| _ = write!(text, "{offset}")),
                SPACE => quoted(&mut text, &space(space_of[item])),
                column => extra
                    .get(&(item, column))
                    .into_iter()
                    .for_each(|field| quoted(&mut text, field)),
            }
        }
        text.push('\n');
    }
    text
}

fn quoted(text: &mut String, field: &str) {
    if field.contains([',', '"', '\n', '\r']) {
        text.push('"');
        field.split('"').enumerate().for_each(|(part, piece)| {
            text.push_str(if part > 0 { "\"\"" } else { "" });
            text.push_str(piece);
        });
        text.push('"');
    } else if field.is_empty() && (text.is_empty() || text.ends_with('\n')) {
        // A line must not begin with an empty field, the id.
        text.push_str("\"\"");
    } else {
        text.push_str(field);
    }
}

/// An id as an element of a list.
fn escaped(id: &str) -> String {
    let escape = |c: char| {
        (c.is_whitespace() || c == '\\')
            .then_some('\\')
            .into_iter()
            .chain([c])
    };
    id.chars().flat_map(escape).collect()
}
