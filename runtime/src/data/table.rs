//! Tables in CSV files.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use csv::{ErrorKind, ReaderBuilder, StringRecord};
use ndarray::{Array1, Array2};
use slabwise_planner::brief;

use super::DataError;

/// The rows of a CSV file (RFC 4180: quotes, quoted line breaks) with their named columns, in
/// memory. Its columns become arrays, of which [`Rows`](super::Rows)
/// makes datasets.
///
/// ```
/// use slabwise::data::{Dataset, Rows, Table};
///
/// let table = Table::of_text("width,height,kind\n1.5,2,cat\n3,4e-1,dog\n0,1,cat\n")?;
/// let (kinds, names) = table.classes("kind")?;
/// assert_eq!((kinds.to_vec(), names), (vec![0, 1, 0], vec!["cat".into(), "dog".into()]));
/// let examples = Rows(table.numbers(&["width", "height"])?).zip(Rows(kinds));
/// assert_eq!(examples.len(), 3);
/// # Ok::<(), slabwise::data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Table {
    path: PathBuf,
    columns: Vec<String>,
    rows: Vec<StringRecord>,
    /// The line in the file that each row begins at.
    lines: Vec<u64>,
}

impl Table {
    /// Reads a file whose first row has the names of the columns.
    ///
    /// # Errors
    /// A [`DataError`] that names the file and the line: unreadable, not UTF-8, without columns,
    /// two columns of one name, or a row with more or fewer fields than there are columns.
    pub fn read(path: impl AsRef<Path>) -> Result<Table, DataError> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| DataError::Io {
            path: path.to_owned(),
            source,
        })?;
        Table::parse(path, file, b',')
    }

    /// Like [`Table::read`], with another byte between fields, such as `b'\t'` or `b';'`.
    ///
    /// # Errors
    /// See [`Table::read`].
    pub fn read_separated(path: impl AsRef<Path>, separator: u8) -> Result<Table, DataError> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| DataError::Io {
            path: path.to_owned(),
            source,
        })?;
        Table::parse(path, file, separator)
    }

    /// The table of a file's content.
    ///
    /// # Errors
    /// See [`Table::read`].
    pub fn of_text(text: &str) -> Result<Table, DataError> {
        Table::parse(Path::new("the data"), text.as_bytes(), b',')
    }

    fn parse(path: &Path, reader: impl Read, separator: u8) -> Result<Table, DataError> {
        let mut reader = ReaderBuilder::new()
            .delimiter(separator)
            .from_reader(reader);
        let failed = |error: csv::Error| failure(path, error);
        let header = reader.headers().map_err(failed)?;
        let columns: Vec<String> = header.iter().map(|name| name.trim().to_owned()).collect();
        let malformed = |detail| {
            Err(DataError::Malformed {
                path: path.to_owned(),
                detail,
            })
        };
        if columns.is_empty() {
            return malformed("it is empty; its first row has the names of the columns".into());
        }
        for (at, name) in columns.iter().enumerate() {
            if columns[..at].contains(name) {
                return malformed(format!("two columns are named \"{}\"", brief(name)));
            }
        }
        let (mut rows, mut lines) = (Vec::new(), Vec::new());
        for row in reader.records() {
            let row = row.map_err(failed)?;
            lines.push(row.position().map_or(0, csv::Position::line));
            rows.push(row);
        }
        Ok(Table {
            path: path.to_owned(),
            columns,
            rows,
            lines,
        })
    }

    /// The names of the columns.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// The texts of a column.
    ///
    /// # Errors
    /// If there is no such column; the error names those that there are.
    pub fn texts(&self, column: &str) -> Result<Vec<&str>, DataError> {
        let at = self.position(column)?;
        Ok(self.rows.iter().map(|row| &row[at]).collect())
    }

    /// The numbers of some columns, f32 `[rows, columns]`. An empty field is NaN.
    ///
    /// # Errors
    /// If there is no such column, or a field is no number: with line and column.
    pub fn numbers(&self, columns: &[&str]) -> Result<Array2<f32>, DataError> {
        let at: Vec<usize> = columns
            .iter()
            .map(|column| self.position(column))
            .collect::<Result<_, _>>()?;
        let mut values = Vec::with_capacity(self.len() * at.len());
        for row in 0..self.len() {
            for &column in &at {
                let value = match self.rows[row][column].trim() {
                    "" => Some(f32::NAN),
                    text => text.parse().ok(),
                };
                values.push(value.ok_or_else(|| self.refused(row, column, "a number"))?);
            }
        }
        let array = Array2::from_shape_vec((self.len(), at.len()), values);
        array.map_err(|error| DataError::Other(error.to_string()))
    }

    /// The integers of a column, i32 `[rows]`.
    ///
    /// # Errors
    /// If there is no such column, or a field is no integer of 32 bits: with line and column.
    pub fn integers(&self, column: &str) -> Result<Array1<i32>, DataError> {
        let at = self.position(column)?;
        let parse = |row: usize| {
            let number = self.rows[row][at].trim().parse().ok();
            number.ok_or_else(|| self.refused(row, at, "an integer of 32 bits"))
        };
        (0..self.len()).map(parse).collect()
    }

    /// A column of texts as classes, i32 `[rows]`: the positions of its texts among the different
    /// ones, which are sorted and given too.
    ///
    /// # Errors
    /// If there is no such column.
    pub fn classes(&self, column: &str) -> Result<(Array1<i32>, Vec<String>), DataError> {
        let texts = self.texts(column)?;
        let mut names = texts.clone();
        names.sort_unstable();
        names.dedup();
        let class = |text: &&str| names.binary_search(text).unwrap_or(0) as i32;
        let classes = texts.iter().map(class).collect();
        Ok((classes, names.into_iter().map(str::to_owned).collect()))
    }

    fn position(&self, column: &str) -> Result<usize, DataError> {
        let found = self.columns.iter().position(|name| name == column);
        found.ok_or_else(|| DataError::Malformed {
            path: self.path.clone(),
            detail: format!(
                "it has no column \"{}\"; its columns are {}",
                brief(column),
                crate::words::list(self.columns.iter().map(String::as_str))
            ),
        })
    }

    /// The error of a field that is not as requested.
    fn refused(&self, row: usize, column: usize, wanted: &str) -> DataError {
        DataError::Malformed {
            path: self.path.clone(),
            detail: format!(
                "line {}, column \"{}\": \"{}\" is not {wanted}",
                self.lines[row],
                brief(&self.columns[column]),
                brief(&self.rows[row][column])
            ),
        }
    }
}

/// The error of a file that cannot be read.
fn failure(path: &Path, error: csv::Error) -> DataError {
    let path = path.to_owned();
    let line = error.position().map_or(0, csv::Position::line);
    let detail = match error.into_kind() {
        ErrorKind::Io(source) => return DataError::Io { path, source },
        ErrorKind::UnequalLengths {
            expected_len, len, ..
        } => {
            format!(
                "line {line} has {len} fields, and there are {expected_len} columns: column {} is {}",
                expected_len.min(len) + 1,
                if len < expected_len {
                    "missing"
                } else {
                    "too much"
                }
            )
        }
        ErrorKind::Utf8 { err, .. } => format!(
            "line {line}, column {}: the text is not UTF-8",
            err.field() + 1
        ),
        other => format!("{other:?}"),
    };
    DataError::Malformed { path, detail }
}
