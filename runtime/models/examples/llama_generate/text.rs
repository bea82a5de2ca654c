//! Texts and tokens of a folder from the Hugging Face hub, by its `tokenizer.json`.

use std::error::Error;
use std::path::Path;

use tokenizers::Tokenizer;

/// The most tokens whose text is held back because its end is no whole character. A character has
/// four bytes at most, each of which may be a token; the last may begin the next character.
const PENDING_MAX: usize = 8;

/// The tokenizer of a folder.
pub struct Texts {
    tokenizer: Tokenizer,
}

impl Texts {
    /// Reads `tokenizer.json`.
    pub fn open(folder: &Path) -> Result<Self, Box<dyn Error>> {
        let path = folder.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path)
            .map_err(|error| format!("cannot read the tokenizer {}: {error}", path.display()))?;
        Ok(Texts { tokenizer })
    }

    /// The tokens of a prompt, all of which are below `vocabulary`.
    pub fn tokens(&self, prompt: &str, vocabulary: usize) -> Result<Vec<i32>, Box<dyn Error>> {
        let encoding = self.tokenizer.encode(prompt, true);
        let encoding = encoding.map_err(|error| format!("the prompt has no tokens: {error}"))?;
        let ids = encoding.get_ids();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            let why = format!(
                "the tokenizer has a token {id}, but the model has {vocabulary}; the files of the folder do not belong together"
            );
            return Err(why.into());
        }
        match ids {
            [] => Err("the prompt has no tokens; give a longer --prompt".into()),
            _ => Ok(ids.iter().map(|&id| id as i32).collect()),
        }
    }

    /// A prompt as the turn of a user in a conversation in ChatML, and the token that ends the turn
    /// of the model.
    pub fn chat(&self, prompt: &str) -> Result<(String, i32), Box<dyn Error>> {
        let [start, end] = ["<|im_start|>", "<|im_end|>"].map(|name| {
            let id = self.tokenizer.token_to_id(name);
            id.ok_or_else(|| format!("the tokenizer has no token {name}; leave --chat away"))
        });
        let (_, end) = (start?, end?);
        let text = format!("<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n");
        Ok((text, end as i32))
    }

    /// The text that follows these tokens.
    pub fn stream(&self, prompt: &[i32]) -> Stream<'_> {
        let last = prompt.last().map(|&token| token as u32);
        Stream {
            tokenizer: &self.tokenizer,
            done: usize::from(last.is_some()),
            tokens: last.into_iter().collect(),
            given: 0,
        }
    }
}

/// The text of tokens that come one by one.
pub struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens whose text came last, on which that of the next ones depends, and those whose
    /// text has not come yet.
    tokens: Vec<u32>,
    /// The number of the former.
    done: usize,
    /// The bytes of text that the latter have given.
    given: usize,
}

impl Stream<'_> {
    /// The text that a token adds, up to the last whole character.
    pub fn push(&mut self, token: i32) -> Result<String, Box<dyn Error>> {
        self.tokens.push(token as u32);
        let text = self.pending()?;
        let whole = match self.tokens.len() - self.done < PENDING_MAX {
            true => text.trim_end_matches(char::REPLACEMENT_CHARACTER).len(),
            false => text.len(),
        };
        let new = text.get(self.given..whole).unwrap_or_default();
        if whole == text.len() {
            self.tokens.drain(..self.done);
            (self.done, self.given) = (self.tokens.len(), 0);
        } else {
            self.given = self.given.max(whole);
        }
        Ok(new.to_owned())
    }

    /// The rest, with an incomplete character as U+FFFD.
    pub fn finish(self) -> Result<String, Box<dyn Error>> {
        let text = self.pending()?;
        Ok(text.get(self.given..).unwrap_or_default().to_owned())
    }

    /// The text of the tokens after those that are done.
    fn pending(&self) -> Result<String, Box<dyn Error>> {
        let decode = |tokens: &[u32]| {
            let text = self.tokenizer.decode(tokens, true);
            text.map_err(|error| format!("cannot decode tokens: {error}"))
        };
        let (before, all) = (decode(&self.tokens[..self.done])?, decode(&self.tokens)?);
        let same = before.chars().zip(all.chars()).take_while(|(a, b)| a == b);
        let same: usize = same.map(|(a, _)| a.len_utf8()).sum();
        Ok(all[same..].to_owned())
    }
}
