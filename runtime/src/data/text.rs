//! Windows of a text.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use ndarray::Array1;

use super::{DataError, Dataset};

/// Windows of a text's tokens, bytes or characters, for models that predict the next: an item is
/// `length` tokens and the same number of tokens one further, i32 each.
///
/// ```
/// use slabwise::data::{Dataset, Text};
///
/// let text = Text::of_chars("abracadabra", 4)?.every(4);
/// assert_eq!((text.vocabulary(), text.len()), (&['a', 'b', 'c', 'd', 'r'][..], 2));
/// let (tokens, next) = text.item(0, 0)?;
/// assert_eq!((text.decode(tokens.iter()), text.decode(&next)), ("abra".into(), "brac".into()));
/// # Ok::<(), slabwise::data::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Text {
    tokens: Arc<[i32]>,
    /// The characters by token; none of a text of bytes.
    vocabulary: Vec<char>,
    length: usize,
    every: usize,
}

impl Text {
    /// Windows of the bytes of a file: 256 tokens.
    ///
    /// # Errors
    /// If the file cannot be read, or has no more than `length` bytes.
    pub fn bytes_of(path: impl AsRef<Path>, length: usize) -> Result<Text, DataError> {
        let path = path.as_ref();
        let bytes = fs::read(path).map_err(|source| io(path, source))?;
        let tokens = bytes.into_iter().map(i32::from).collect();
        Text::of_tokens(tokens, Vec::new(), length, &path.display().to_string())
    }

    /// Windows of the characters of a file in UTF-8: a token for each character that occurs, in
    /// their order.
    ///
    /// # Errors
    /// Those of [`Text::bytes_of`], and if the file is not UTF-8.
    pub fn chars_of(path: impl AsRef<Path>, length: usize) -> Result<Text, DataError> {
        let path = path.as_ref();
        let bytes = fs::read(path).map_err(|source| io(path, source))?;
        let text = String::from_utf8(bytes).map_err(|error| DataError::Malformed {
            path: path.to_owned(),
            detail: format!(
                "it is no text in UTF-8: {}; read its bytes",
                error.utf8_error()
            ),
        })?;
        Text::of_text(&text, length, &path.display().to_string())
    }

    /// Windows of the characters of a text.
    ///
    /// # Errors
    /// If there are no more than `length`.
    pub fn of_chars(text: &str, length: usize) -> Result<Text, DataError> {
        Text::of_text(text, length, "the text")
    }

    fn of_text(text: &str, length: usize, origin: &str) -> Result<Text, DataError> {
        let known: BTreeSet<char> = text.chars().collect();
        let vocabulary: Vec<char> = known.into_iter().collect();
        let token = |c: char| vocabulary.binary_search(&c).unwrap_or(0) as i32;
        let tokens = text.chars().map(token).collect();
        Text::of_tokens(tokens, vocabulary, length, origin)
    }

    fn of_tokens(
        tokens: Arc<[i32]>,
        vocabulary: Vec<char>,
        length: usize,
        origin: &str,
    ) -> Result<Text, DataError> {
        if length == 0 || tokens.len() <= length {
            let detail = format!(
                "a window of {length} tokens and the next needs {} tokens, and there are {}",
                length.max(1).saturating_add(1),
                tokens.len()
            );
            let origin = origin.to_owned();
            return Err(DataError::Inconsistent { origin, detail });
        }
        Ok(Text {
            tokens,
            vocabulary,
            length,
            every: 1,
        })
    }

    /// Begins a window at every `distance`-th token (0 counts as 1) instead of every token.
    #[must_use]
    pub fn every(mut self, distance: usize) -> Text {
        self.every = distance.max(1);
        self
    }

    /// The characters by token, sorted; empty for a text of bytes.
    pub fn vocabulary(&self) -> &[char] {
        &self.vocabulary
    }

    /// The number of different tokens: 256 for bytes.
    pub fn tokens(&self) -> usize {
        match self.vocabulary.len() {
            0 => 256,
            n => n,
        }
    }

    /// The token of a character, if it occurs.
    pub fn encode(&self, c: char) -> Option<i32> {
        match self.vocabulary.is_empty() {
            true => u8::try_from(c).ok().map(i32::from),
            false => self.vocabulary.binary_search(&c).ok().map(|at| at as i32),
        }
    }

    /// The text of some tokens; those without a character, and bytes that are no UTF-8, become �.
    pub fn decode<'a>(&self, tokens: impl IntoIterator<Item = &'a i32>) -> String {
        let tokens = tokens.into_iter().map(|&token| usize::try_from(token).ok());
        if self.vocabulary.is_empty() {
            let byte = |token: Option<usize>| token.and_then(|t| u8::try_from(t).ok());
            let bytes: Vec<u8> = tokens.map(|token| byte(token).unwrap_or(0xFF)).collect();
            return String::from_utf8_lossy(&bytes).into_owned();
        }
        let char = |token: Option<usize>| self.vocabulary.get(token?).copied();
        tokens
            .map(|token| char(token).unwrap_or(char::REPLACEMENT_CHARACTER))
            .collect()
    }
}

impl Dataset for Text {
    type Item = (Array1<i32>, Array1<i32>);

    fn len(&self) -> usize {
        (self.tokens.len() - self.length).div_ceil(self.every)
    }

    fn item(&self, index: usize, _: u64) -> Result<Self::Item, DataError> {
        let start = index.saturating_mul(self.every);
        let window = |start: usize| {
            let tokens = self.tokens.get(start..start.checked_add(self.length)?)?;
            Some(Array1::from_vec(tokens.to_vec()))
        };
        let pair = window(start).zip(window(start.saturating_add(1)));
        pair.ok_or_else(|| {
            let len = self.len();
            DataError::Other(format!("there is no such window; the text has {len}"))
        })
    }
}

fn io(path: &Path, source: std::io::Error) -> DataError {
    let path = path.to_owned();
    DataError::Io { path, source }
}
