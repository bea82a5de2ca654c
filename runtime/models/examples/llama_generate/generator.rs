//! The continuation of a prompt: chunks of it are read at once, then token by token.

use ndarray::{Array2, arr0};
use slabwise::prelude::*;
use slabwise_models::{CACHED, Decoder, Sampling};

/// The most tokens of a prompt that one run reads.
const CHUNK_MAX: usize = 128;

/// A session whose cache has the keys and values of a text.
pub struct Generator {
    session: Session,
    /// The program that reads a chunk of the prompt, and the length of a chunk.
    read: Option<(Program<0>, usize)>,
    /// The program that reads a token and chooses the next.
    write: Program<1>,
}

impl Generator {
    /// Compiles the programs for a prompt of this many tokens and `more` tokens after it.
    pub fn new(
        mut session: Session,
        decoder: &Decoder,
        sampling: Sampling,
        prompt: usize,
        more: usize,
    ) -> Result<Self> {
        // The last token of the prompt is not read in a chunk, because it chooses the next.
        let before = prompt.saturating_sub(1);
        let chunks = before.div_ceil(CHUNK_MAX);
        let chunk = match chunks {
            0 => 0,
            _ => before.div_ceil(chunks),
        };
        let capacity = (chunks * chunk).max(before + more);
        let read = match chunk {
            0 => None,
            _ => {
                let trace = Trace::inference().named("read");
                let _ = decoder.continued(trace.input("tokens", I32, (1, chunk)), capacity);
                Some((session.compile(&trace, [])?, chunk))
            }
        };
        let trace = Trace::inference().sampling().named("write");
        let logits = decoder.continued(trace.input("token", I32, (1, 1)), capacity);
        let write = session.compile(&trace, [sampling.of(logits)])?;
        Ok(Generator {
            session,
            read,
            write,
        })
    }

    /// The session, to load weights into.
    pub fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Reads a prompt of at least one token; the token that follows it.
    pub fn prompt(&mut self, tokens: &[i32]) -> Result<i32> {
        self.session.set_value(CACHED, &arr0(0))?;
        let Some((&last, before)) = tokens.split_last() else {
            return Ok(0);
        };
        if let Some((read, length)) = &self.read {
            for chunk in before.chunks(*length) {
                // The last chunk is padded. Its padding is forgotten, and later tokens are written
                // over it.
                let token = |(_, at): (usize, usize)| chunk.get(at).copied().unwrap_or(last);
                let chunk = Array2::from_shape_fn((1, *length), token);
                let [] = self.session.run(read, (&chunk,))?;
            }
            self.session.set_value(CACHED, &arr0(before.len() as i32))?;
        }
        self.next(last)
    }

    /// Reads a token; the token that follows it.
    pub fn next(&mut self, token: i32) -> Result<i32> {
        let token = Array2::from_elem((1, 1), token);
        let [next] = self.session.run(&self.write, (&token,))?;
        Ok(next.view::<i32>()?[[0]])
    }
}
