// Pictures that go with a question: read as data: URLs, large ones made smaller first. What is shown
// are these alone: no answer and no imported file can name a picture that is elsewhere.

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"]; // as the server reads them
const MAX_BYTES = 20 * 1024 * 1024; // of a file
const AS_THEY_ARE = 1024 * 1024; // bytes; larger ones are made smaller
const MAX_SIDE = 2048; // pixels: more than a model looks at
const QUALITY = 0.92;
const ADDRESS = /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$/;

export const MAX_PICTURES = 16; // of a question; a conversation is sent whole, and the server counts
export const isPicture = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml";
export const isPictureAddress = (value) => typeof value === "string" && ADDRESS.test(value);

// The data: URL of a picture's file. Throws words.
export async function readPicture(file, name) {
  if (file.size > MAX_BYTES) throw new Error(`“${name}” has more than 20 MB; choose a smaller picture.`);
  try {
    const kept = KINDS.includes(file.type) && file.size <= AS_THEY_ARE;
    const image = await createImageBitmap(file); // upright; throws where it is no picture
    const address = await addressOf(kept ? file : await smaller(image));
    image.close();
    if (isPictureAddress(address)) return address;
  } catch {
    // told below
  }
  throw new Error(`“${name}” cannot be read as a picture; attach a PNG, JPEG, WebP or GIF file.`);
}

async function smaller(image) {
  const factor = Math.min(1, MAX_SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * factor));
  canvas.height = Math.max(1, Math.round(image.height * factor));
  const drawing = canvas.getContext("2d");
  drawing.fillStyle = "#fff"; // behind what is transparent: JPEG has black there
  drawing.fillRect(0, 0, canvas.width, canvas.height);
  drawing.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
}

const addressOf = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });

export function thumbnail({ name, picture }) {
  const image = document.createElement("img");
  image.className = "picture";
  image.alt = name;
  image.src = picture;
  return image;
}

// The content of a question: its pictures first, as models are taught.
export function contentOf(text, files) {
  const pictures = files.filter((file) => file.picture);
  if (!pictures.length) return text;
  const shown = pictures.map(({ picture }) => ({ type: "image_url", image_url: { url: picture } }));
  return text ? [...shown, { type: "text", text }] : shown;
}
