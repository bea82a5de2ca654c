//! The models that the values of their sizes stand for.

use super::Values;
use crate::{Bert, Diffusion, Gpt, Llama, LstmModel, Ode, UNet, Vae, Vit};

/// The transformer of these sizes.
pub(crate) fn gpt(&[layers, width, heads, length, vocabulary, tied, ..]: &Values) -> Gpt {
    Gpt {
        layers,
        width,
        heads,
        length,
        vocabulary,
        tied: tied == 1,
    }
}

pub(crate) fn lstm(&[vocabulary, width, hidden, length, layers, ..]: &Values) -> LstmModel {
    LstmModel {
        vocabulary,
        width,
        hidden,
        length,
        layers,
    }
}

pub(crate) fn unet(&[inputs, width, levels, classes, ..]: &Values) -> UNet {
    UNet {
        inputs,
        width,
        levels,
        classes,
    }
}

pub(crate) fn ode(&[width, hidden, steps, classes, ..]: &Values) -> Ode {
    Ode {
        width,
        hidden,
        steps,
        classes,
    }
}

pub(crate) fn bert(&[layers, width, heads, inner, length, vocabulary, ..]: &Values) -> Bert {
    Bert {
        layers,
        width,
        heads,
        inner,
        length,
        vocabulary,
        positions: length.max(Bert::BASE.positions),
        ..Bert::BASE
    }
}

pub(crate) fn vit(&[size, patch, layers, width, heads, inner, classes, ..]: &Values) -> Vit {
    Vit {
        size,
        patch,
        layers,
        width,
        heads,
        inner,
        classes,
        ..Vit::BASE
    }
}

/// The most groups, up to 32, that divide a number of channels.
fn groups(channels: usize) -> usize {
    1 << channels.trailing_zeros().min(5)
}

pub(crate) fn diffusion(
    &[
        size,
        inputs,
        width,
        levels,
        blocks,
        attention,
        heads,
        classes,
    ]: &Values,
) -> Diffusion {
    Diffusion {
        size,
        inputs,
        width,
        levels,
        blocks,
        attention,
        heads,
        classes,
        groups: groups(width),
        ..Diffusion::CIFAR
    }
}

pub(crate) fn vae(&[size, inputs, width, levels, blocks, latent, ..]: &Values) -> Vae {
    Vae {
        size,
        inputs,
        width,
        levels,
        blocks,
        latent,
        groups: groups(width),
    }
}

pub(crate) fn llama(
    &[
        layers,
        width,
        heads,
        key_heads,
        inner,
        length,
        vocabulary,
        tied,
    ]: &Values,
) -> Llama {
    Llama {
        layers,
        width,
        heads,
        key_heads,
        inner,
        length,
        vocabulary,
        tied: tied == 1,
        ..Llama::SMALL
    }
}
