// What is not here is Marp's default. Nothing may be fetched when a deck is looked at: no emoji pictures, no web fonts.
export default {
  allowLocalFiles: true,
  html: true,
  options: { emoji: { shortcode: false, unicode: false }, math: 'mathjax' },
}
