//! A text as tokens, one for each different character.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use ndarray::Array2;
use slabwise::data::epoch_seed;
use slabwise::{Error, Result, World};

/// The text that comes with the example; see data/text/README.md.
const SHAKESPEARE: &[u8] = include_bytes!("../../data/text/shakespeare.txt.gz");

/// The most bytes of a text that are read.
pub const BYTES_MAX: u64 = 64 << 20;

/// The most different characters of a text; a file with more is not accepted as one.
pub const CHARACTERS_MAX: usize = 1 << 12;

/// A text: its different characters in order, and the number of each of its characters among them.
#[derive(Debug)]
pub struct Text {
    /// The different characters.
    pub characters: Vec<char>,
    /// The text; its first nine tenths are for training, the rest is for validation.
    pub tokens: Vec<i32>,
}

/// A window of a text, and the next character after each of its characters: `[n, length]` each.
pub type Batch = (Array2<i32>, Array2<i32>);

impl Text {
    /// The text of a file (UTF-8, plain or gzip-compressed), or the one that comes with the
    /// example; long enough for windows of this length.
    ///
    /// # Errors
    /// In words, for a file that cannot be read, is no text, or is too long or too short.
    pub fn read(path: Option<&Path>, length: usize) -> Result<Text> {
        let Some(path) = path else {
            return Text::parse("the built-in text", SHAKESPEARE, length);
        };
        let name = path.display().to_string();
        let unread = |why: std::io::Error| Error::Value(format!("{name}: {why}"));
        let file = File::open(path).map_err(unread)?;
        let mut bytes = Vec::new();
        // Reads one byte more than allowed, to detect a file that is too long.
        file.take(BYTES_MAX + 1)
            .read_to_end(&mut bytes)
            .map_err(unread)?;
        Text::parse(&name, &bytes, length)
    }

    fn parse(name: &str, bytes: &[u8], length: usize) -> Result<Text> {
        let wrong = |why: String| Err(Error::Value(format!("{name}: {why}")));
        let mut text = bytes.to_vec();
        if bytes.starts_with(&[0x1f, 0x8b]) {
            text.clear();
            if let Err(why) = MultiGzDecoder::new(bytes)
                .take(BYTES_MAX + 1)
                .read_to_end(&mut text)
            {
                return wrong(format!("the gzip data is damaged: {why}"));
            }
        }
        if text.len() as u64 > BYTES_MAX {
            return wrong(format!(
                "the text is longer than {BYTES_MAX} bytes; take a part of it"
            ));
        }
        let text = match String::from_utf8(text) {
            Ok(text) => text,
            Err(e) => {
                return wrong(format!(
                    "byte {} is not UTF-8; convert the text first",
                    e.utf8_error().valid_up_to()
                ));
            }
        };
        let characters: Vec<char> = text
            .chars()
            .collect::<BTreeSet<char>>()
            .into_iter()
            .collect();
        if characters.len() > CHARACTERS_MAX {
            return wrong(format!(
                "{} different characters, more than {CHARACTERS_MAX}; is it a text?",
                characters.len()
            ));
        }
        let tokens: Vec<i32> = text
            .chars()
            .filter_map(|c| characters.binary_search(&c).ok())
            .map(|at| at as i32)
            .collect();
        let text = Text { characters, tokens };
        if text.judged_by().len() <= length {
            let needed = (length + 1) * 10;
            return wrong(format!(
                "{} characters are too few for windows of {length}: {needed} are needed",
                text.tokens.len()
            ));
        }
        Ok(text)
    }

    /// The code points of the characters.
    pub fn codes(&self) -> Vec<i32> {
        self.characters.iter().map(|&c| c as i32).collect()
    }

    /// Fails if these code points, of the text that a checkpoint was trained on, are others.
    ///
    /// # Errors
    /// With the first number that stands for another character.
    pub fn check_codes<'a>(&self, codes: impl IntoIterator<Item = &'a i32>) -> Result<()> {
        let mut both = self.characters.iter().zip(codes).enumerate();
        let Some((at, (here, there))) = both.find(|(_, (here, there))| **here as i32 != **there)
        else {
            return Ok(());
        };
        let there = u32::try_from(*there).ok().and_then(char::from_u32);
        Err(Error::Value(format!(
            "number {at} is {here:?} in this text, and {:?} in that of the checkpoint; resume with the text that it was trained on",
            there.unwrap_or_default()
        )))
    }

    fn learnt_from(&self) -> &[i32] {
        &self.tokens[..self.tokens.len() / 10 * 9]
    }

    fn judged_by(&self) -> &[i32] {
        &self.tokens[self.tokens.len() / 10 * 9..]
    }

    /// `steps` batches of `batch` windows at places that the seed decides; of each the share of this
    /// rank of a world.
    pub fn windows(
        &self,
        length: usize,
        batch: usize,
        steps: usize,
        seed: u64,
        world: &World,
    ) -> impl Iterator<Item = Batch> + use<'_> {
        let text = self.learnt_from();
        let starts = (text.len() - length) as u64;
        let own = world.share(batch);
        (0..steps).map(move |step| {
            let start = |i: usize| (epoch_seed(seed, (step * batch + i) as u64) % starts) as usize;
            cut(text, length, own.clone().map(start).collect())
        })
    }

    /// At most `most` windows of the validation text, spread evenly, `batch` at a time; of each batch
    /// the share of this rank of a world.
    pub fn validation(
        &self,
        length: usize,
        batch: usize,
        most: usize,
        world: &World,
    ) -> impl Iterator<Item = Batch> + use<'_> {
        let text = self.judged_by();
        let all = (text.len() - 1) / length;
        let taken = all.min(most);
        let starts: Vec<usize> = (0..taken).map(|i| i * all / taken * length).collect();
        let own = |batch: &[usize]| batch[world.share(batch.len())].to_vec();
        let chunks: Vec<Vec<usize>> = starts.chunks(batch).map(own).collect();
        chunks
            .into_iter()
            .map(move |starts| cut(text, length, starts))
    }

    /// A text in tokens; characters that it does not have are left out.
    pub fn encode(&self, text: &str) -> Vec<i32> {
        text.chars()
            .filter_map(|c| self.characters.binary_search(&c).ok())
            .map(|at| at as i32)
            .collect()
    }
}

/// The windows at these starts, and the same windows moved by one character.
fn cut(text: &[i32], length: usize, starts: Vec<usize>) -> Batch {
    let at = |offset: usize| {
        Array2::from_shape_fn((starts.len(), length), |(i, j)| {
            text[starts[i] + j + offset]
        })
    };
    (at(0), at(1))
}
